"""`sidestep cache`: bundles, and what the cache holds; the work is done by `bundles`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from . import bundles, cli
from .cache.bundle import KINDS

_FILE = click.Path(dir_okay=False, path_type=Path)
_failures_only = click.option("--failures-only", is_flag=True, help="No plans.")
_plans_only = click.option("--plans-only", is_flag=True, help="No failure records.")


@cli.main.group()
def cache() -> None:
    """Bundles, which another machine takes over, and what the cache holds."""


@cache.command("export")
@click.argument("file", type=_FILE)
@_failures_only
@_plans_only
@click.option("--backend", help="Only this backend's.")
@click.option("--environment", default="", metavar="DIGEST", help="Only this environment's (its first digits).")
@cli._json
def cache_export(
    file: Path, failures_only: bool, plans_only: bool, backend: str | None, environment: str, as_json: bool
) -> None:
    """Write what the cache holds to FILE, a bundle."""
    report = bundles.export(file, _kinds(failures_only, plans_only), backend, environment)
    _tell(report, as_json, "left out", file)


@cache.command("import")
@click.argument("file", type=_FILE)
@_failures_only
@_plans_only
@cli._json
def cache_import(file: Path, failures_only: bool, plans_only: bool, as_json: bool) -> None:
    """Take over the records and plans of FILE, a bundle; what is damaged is refused.

    Exit code 1 where anything was refused. Plans are native code for the GPU: take them from those whom you trust.
    """
    report = bundles.take(file, _kinds(failures_only, plans_only))
    bundles.locate(report.groups.values())
    taken = f"; {report.written} taken, {report.unchanged} here already as new or newer"
    _tell(report, as_json, "refused", file, taken, written=report.written, unchanged=report.unchanged)
    if not as_json:
        for line in place_text(report):
            click.echo(line, err=True)
    sys.exit(1 if report.refused else 0)


@cache.command("merge")
@click.argument("files", nargs=-1, required=True, metavar="A B...", type=_FILE)
@click.option("-o", "output", required=True, metavar="C", type=_FILE, help="The bundle to write.")
@cli._json
def cache_merge(files: tuple[Path, ...], output: Path, as_json: bool) -> None:
    """Write one bundle of several; of two records of one failure the later stays.

    Exit code 1 where anything was refused.
    """
    report = bundles.merge(files, output)
    _tell(report, as_json, "refused", output)
    sys.exit(1 if report.refused else 0)


@cache.command("info")
@click.argument("file", required=False, type=_FILE)
@cli._json
def cache_info(file: Path | None, as_json: bool) -> None:
    """What the cache, or FILE, a bundle, holds: by environment and backend."""
    report = bundles.info(file)
    _tell(report, as_json, "damaged", file or cli._place())


@cache.command("clear")
@click.option("--failures", is_flag=True, help="All failure records.")
@click.option("--plans", is_flag=True, help="All plans, and the list of wanted ones.")
@click.option("--all", "everything", is_flag=True, help="Both.")
@cli._json
def cache_clear(failures: bool, plans: bool, everything: bool, as_json: bool) -> None:
    """Delete what the cache holds; bundles stay as they are. The files keep their size for what comes next."""
    chosen = (failures or everything, plans or everything)
    if not any(chosen):
        raise click.UsageError("give --failures, --plans, or --all")
    counts = bundles.clear([kind for kind, wanted in zip(KINDS, chosen, strict=True) if wanted])
    if as_json:
        click.echo(json.dumps({"schema": 1, "items": [{"kind": kind, "deleted": n} for kind, n in counts.items()]}))
    else:
        click.echo(f"deleted: {', '.join(f'{kind} {n}' for kind, n in counts.items())} ({cli._place()})", err=True)


def place_text(report: bundles.Report) -> list[str]:
    """Where the records of an import are good for anything, for people."""
    groups = list(report.groups.values())
    here = [group for group in groups if group.here]
    elsewhere = [group for group in groups if not group.here]
    lines = []
    if here:
        lines.append(f"{_count(here)} of this machine's environments: in use from now on")
    if elsewhere:
        lines.append(f"{_count(elsewhere)} of other environments: kept, and used where they belong:")
    for group in elsewhere:
        device = group.fields.get("device", "unknown device")
        if group.differs:
            differs = ", ".join(f"{name} {there}, here {ours}" for name, (ours, there) in group.differs.items())
            lines.append(f"  {group.backend} on {device}: {differs}")
        else:
            lines.append(f"  {group.backend} on {device}: there is no such device, or not this backend, here")
    if report.total("plans"):
        lines.append(
            "plans are native code that the GPU will run; if you do not trust them: sidestep cache clear --plans"
        )
    return [cli._clean(line) for line in lines]


def _count(groups: Sequence[bundles.Group]) -> int:
    return sum(group.failures + group.plans for group in groups)


def _kinds(failures_only: bool, plans_only: bool) -> tuple[str, ...]:
    if failures_only and plans_only:
        raise click.UsageError("--failures-only and --plans-only leave nothing")
    return KINDS[:1] if failures_only else KINDS[1:] if plans_only else KINDS


def _totals(report: bundles.Report) -> str:
    failures, plans = report.total("failures"), report.total("plans")
    return f"{failures} failure record{'' if failures == 1 else 's'}, {plans} plan{'' if plans == 1 else 's'}"


def _tell(
    report: bundles.Report, as_json: bool, refused: str, place: Path | str, more: str = "", **more_json: Any
) -> None:
    """Print a report: `refused` says what was done to what was not taken, `place` where the rest is."""
    if as_json:
        items = [group.to_json() for group in report.groups.values()]
        click.echo(
            json.dumps(
                {"schema": 1, "items": items, "refused": list(map(dataclasses.asdict, report.refused)), **more_json}
            )
        )
        return
    _print_groups(report)
    _print_refused(report, refused)
    click.echo(f"{place}: {_totals(report)}{more}", err=True)


def _print_groups(report: bundles.Report) -> None:
    if not report.groups:
        return
    rows = [
        (
            group.environment,
            group.backend,
            str(group.failures),
            str(group.plans),
            str(group.bytes),
            ", ".join(f"{name} {value}" for name, value in group.fields.items()),
        )
        for group in report.groups.values()
    ]
    cli._print_table(("ENVIRONMENT", "BACKEND", "FAILURES", "PLANS", "BYTES", "WHAT IT IS"), rows, whole=5)


def _print_refused(report: bundles.Report, word: str) -> None:
    for one in report.refused:
        click.echo(cli._clean(f"{word}: {one.name:.200}: {one.reason:.300} ({one.file})"), err=True)
    if report.refused:
        click.echo(f"{len(report.refused)} {word}", err=True)
