"""Entry of the sandbox: argument 1 is the settings as JSON, standard input the job, standard output the report."""

import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import isolate
from programs import Program


def main():
    settings = json.loads(sys.argv[1])
    if settings["kind"] == "functions":
        import functions as kind
    else:
        import unittests as kind
    del sys.path[0]
    sys.path += settings["import_paths"]
    missing = isolate.enter([*isolate.python_paths(), *settings["import_paths"]], settings["limits"]["tmpfs_mb"])
    program = Program(kind.serve, settings["limits"])  # before the job is read: its memory holds no test
    job = json.loads(sys.stdin.buffer.read())
    program.set_limits(job["test_s"], job["total_s"])
    out = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    report = kind.check(program, job)
    report |= {"missing": missing, "cpu_s": program.used()}
    program.kill()
    with os.fdopen(out, "w") as file:
        json.dump(report, file)
        file.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
