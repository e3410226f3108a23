"""``tmrun trace``: a migration as a file for Perfetto or chrome://tracing, or as spans line by line."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from tmrun.cli import jobs, read
from tmrun.core import spans
from tmrun.core.errors import NotFoundError
from tmrun.core.plural import many


@click.command("trace", short_help="Export a migration for Perfetto or chrome://tracing, or as JSON lines.")
@click.argument("epoch", type=click.IntRange(1))
@jobs.job_options
@click.option("--form", type=click.Choice(["chrome", "jsonl"]), default="chrome", show_default=True, help="jsonl: a span a line.")
@click.option("--to", "path", type=click.Path(dir_okay=False), metavar="FILE", help="Write here. [default: stdout]")
def command(epoch: int, job: str | None, etcd: str | None, form: str, path: str | None) -> None:
    """Show where the time of the migration to EPOCH went, rank by rank. `tmrun history` lists the epochs.

    Open the file in https://ui.perfetto.dev or chrome://tracing. Tracks are aligned at the moment the next step begins: no clocks are
    compared.
    """
    with jobs.connect(job, etcd) as connection:
        current = connection.read()
        found = next((m for m in read.read_maps(connection) if m.epoch == epoch), None)
        if found is None:
            raise NotFoundError(f"job {connection.keys.job} has no epoch {epoch}; its newest is {current.epoch}")
        timings = read.read_timings(connection).get(epoch, [])
        nproc = current.spec.nproc if current.spec else 1
        name = connection.keys.job
    if not timings:
        raise NotFoundError(
            f"no worker has told how it fared in epoch {epoch} ({found.kind.value}): only migrations are traced, not launches"
        )
    lines = spans.spans(found, timings, nproc)
    title = f"{name} epoch {epoch}: {found.kind.value} {found.reason}"
    text = json.dumps(spans.chrome(lines, title)) if form == "chrome" else "\n".join(json.dumps(asdict(s)) for s in lines)
    if path is None:
        click.echo(text)
    else:
        Path(path).write_text(text + "\n")
        click.echo(f"{many(len(lines), 'span')} of {many(len(timings), 'worker')} written to {path}", err=True)
