"""The process of one guided fuzzer: ``python -m fuzz.guided READER OUT TOLD SECONDS CASES SEED``.

Only the package is instrumented, so that coverage is that of the readers and not of Python's libraries.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import atheris

with atheris.instrument_imports(include=["gossamer"]):
    from fuzz.mutate import mutated_bytes
    from fuzz.readers import READERS, Reader
    from fuzz.run import Session, known
with atheris.instrument_imports(include=["fuzz"]):  # what is imported already stays as it is
    from fuzz import planted

_LARGEST = 1 << 17  # of what atheris makes; larger files come from the corpus alone


def main(name: str, out: str, told: str, seconds: str, cases: str, seed: str) -> NoReturn:
    reader = READERS[name] if name in READERS else Reader(name, planted.read, lambda: [b""], mutated_bytes)
    session, rng = Session(reader, Path(out)), random.Random(f"{name} {seed} guided")
    most, end = None if cases == "None" else int(cases), time.monotonic() + float(seconds)

    def one(content: bytes) -> None:
        problem = session.run(content)
        if (problem and name not in READERS) or session.tally.cases == most or time.monotonic() >= end:
            Path(told).write_text(json.dumps(asdict(session.close())))
            os._exit(0)  # libFuzzer has no other way to be left

    def mutate(content: bytes, size: int, number: int) -> bytes:
        if rng.random() < 0.5:
            return atheris.Mutate(content, size)
        return reader.forge(content, random.Random(number))[:size]

    with tempfile.TemporaryDirectory() as corpus:
        for number, content in enumerate(known(reader)):
            Path(corpus, str(number)).write_bytes(content)
        flags = [
            f"-seed={1 + hash(seed) % 1000}",
            f"-max_len={_LARGEST}",
            "-timeout=3600",
            "-rss_limit_mb=0",
            "-handle_xfsz=0",
        ]
        atheris.Setup([sys.argv[0], *flags, corpus], one, custom_mutator=mutate)
        atheris.Fuzz()
    raise AssertionError("atheris has returned")


if __name__ == "__main__":
    main(*sys.argv[1:])
