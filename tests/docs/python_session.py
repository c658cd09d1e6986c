"""Runs files one after the other in one namespace.

Arguments: the descriptor on which the names of the files arrive, and the one on which each is
answered with an error in JSON, or null."""

import json
import sys
import traceback

names = {"__name__": "__main__"}
with open(int(sys.argv[1])) as requests, open(int(sys.argv[2]), "w") as replies:
    for line in requests:
        path, error = line.rstrip("\n"), None
        try:
            with open(path) as file:
                exec(compile(file.read(), path, "exec"), names)
        except BaseException as raised:
            traceback.print_exc()
            error = repr(raised)
        print(json.dumps(error), file=replies, flush=True)
