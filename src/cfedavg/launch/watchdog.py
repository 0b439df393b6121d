"""Stop the processes of a launcher that was killed: `python -m cfedavg.launch.watchdog WORD`.

Only the launcher holds the other end of the standard input, so that this closes when the launcher ends, in
whatever way. Until then it tells the pid of each process that it starts.
"""

from __future__ import annotations

import sys
import time
from functools import partial

from cfedavg.launch.processes import alive, end_all


def main() -> None:
    (word,) = sys.argv[1:]
    told = [int(line) for line in sys.stdin]
    time.sleep(0.1)  # one that was being started has its environment by then
    end_all(partial(alive, word, told))


if __name__ == "__main__":
    main()
