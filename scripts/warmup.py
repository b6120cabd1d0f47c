"""`sidestep warmup` as a script: python scripts/warmup.py SPEC --device h200."""

from sidestep.cli import warmup

if __name__ == "__main__":
    warmup(prog_name="warmup.py")
