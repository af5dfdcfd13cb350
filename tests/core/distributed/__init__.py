"""Two processes that talk over gloo, against one process with the joint batch."""
