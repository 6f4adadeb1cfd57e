"""A script for tests: takes the steps that it is told to, says more than a pipe holds, and fails."""

import sys

for _ in range(int(sys.argv[1])):
    sys.stdin.readline()
    print('{"seconds": 1.0}', flush=True)
print("x" * 300_000, file=sys.stderr)
raise RuntimeError("out of luck")
