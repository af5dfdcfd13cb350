"""Fuzzing: every reader meets damaged and hostile input, and answers with a result or an error that says what to do."""
