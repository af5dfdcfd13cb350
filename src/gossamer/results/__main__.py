import sys
from pathlib import Path

from gossamer.results.pages import documents

if __name__ == "__main__":
    for path, content in documents(Path(sys.argv[1] if len(sys.argv) > 1 else ".")).items():
        path.write_text(content)
