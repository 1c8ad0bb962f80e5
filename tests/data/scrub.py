"""Takes the names of the recording machine out of Kineto traces, in place.

    python tests/data/scrub.py tests/data/gloo_ddp tests/data/gloo_blocked

It works on the text: a parser would write the times back in another form.
"""

import gzip
import re
import sys
from pathlib import Path

NAMED = re.compile(rb'("(?:host_name|traceName)": )"[^"]*"')


def main() -> None:
    for folder in sys.argv[1:]:
        for path in sorted(Path(folder).glob("**/*.json.gz")):
            text = NAMED.sub(rb'\1"scrubbed"', gzip.decompress(path.read_bytes()))
            # Without a time in it, the same trace compresses to the same file.
            path.write_bytes(gzip.compress(text, mtime=0))


if __name__ == "__main__":
    main()
