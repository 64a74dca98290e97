"""A program run as a script with its own standard input and output: `script.py DESCRIPTOR_OF_ITS_SOURCE`."""

import os
import sys
import types

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from program import compiled

del sys.path[0]


def main() -> None:
    with open(int(sys.argv[1]), encoding="utf-8", errors="surrogatepass") as file:
        source = file.read()
    sys.argv = ["program.py"]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compiled(source), vars(module))


main()
