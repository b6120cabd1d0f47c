"""`sidestep failures` as a script: python scripts/inspect_failures.py list."""

from sidestep.cli import failures

if __name__ == "__main__":
    failures(prog_name="inspect_failures.py")
