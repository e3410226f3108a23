"""The flags of ``tmrun run`` about what may go wrong: hangs, slow nodes, failure domains, machines that are about to go away.

May not know: what a launch does with them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from tmrun.cli.arguments import Whole, option
from tmrun.cli.labels import Labels
from tmrun.config import NoticeSources
from tmrun.core import placement, watchdog
from tmrun.core.errors import UsageError
from tmrun.core.model import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Care:
    """The flags as given."""

    hang_timeout: str
    hang_action: str
    straggler: str
    label_file: str | None
    label_pattern: str | None
    notice_file: tuple[str, ...]
    notice_command: tuple[str, ...]
    notice_url: tuple[str, ...]
    kubernetes_node: str | None
    notice_deadline: float
    label: tuple[str, ...]

    def apply(self, spec: Spec) -> Spec:
        """What all nodes have to know."""
        return replace(spec, hang_timeout=self.hang_timeout, hang_action=self.hang_action, straggler=self.straggler)

    def check_care(self) -> None:
        """Raises UsageError."""
        watchdog.limits(self.hang_timeout)
        self.labels()
        self.notices()

    def labels(self) -> Labels:
        """Where hosts are. Raises UsageError."""
        given = {}
        for item in self.label:
            key, separator, value = item.partition("=")
            if not separator or not key:
                raise UsageError(f"--label {item!r}: expected KEY=VALUE, e.g. rack=r1")
            given[key] = value
        pattern = placement.parse_pattern(self.label_pattern) if self.label_pattern else None
        return Labels(given, Path(self.label_file) if self.label_file else None, pattern)

    def notices(self) -> NoticeSources:
        """Who is asked whether this machine goes away. Raises UsageError."""
        node, _, server = (self.kubernetes_node or "").partition("@")
        if node and not server:
            host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
            if not host:
                raise UsageError("--kubernetes-node: $KUBERNETES_SERVICE_HOST is not set; write NODE@https://HOST:PORT of the API server")
            server = f"https://{host}:{port}"
        return NoticeSources(self.notice_file, self.notice_command, self.notice_url, node, server, self.notice_deadline)


_OPTIONS = (
    option(
        "--hang-timeout",
        ours=True,
        default="auto",
        show_default=True,
        metavar="auto|SECONDS|off",
        help="How much longer than ever before a step may take before somebody is looked for who keeps the others waiting.",
    ),
    option(
        "--hang-action",
        ours=True,
        type=click.Choice(["replace", "notify"]),
        default="replace",
        show_default=True,
        help="End the workers of the node that is to blame, or only say so.",
    ),
    option(
        "--straggler",
        ours=True,
        type=click.Choice(["off", "notify", "drain"]),
        default="notify",
        show_default=True,
        help="What to do about a node that computes slower than the others.",
    ),
    option(
        "--label-file",
        ours=True,
        type=click.Path(exists=True, dir_okay=False),
        help="Lines HOST KEY=VALUE ...; $SLURM_TOPOLOGY_ADDR is read by itself.",
    ),
    option("--label-pattern", ours=True, metavar="REGEX", help="Labels from host names, e.g. 'r(?P<rack>[0-9]+)n[0-9]+'."),
    option(
        "--notice-file",
        ours=True,
        multiple=True,
        type=Whole(),
        metavar="PATH",
        help="Drain this machine once the file exists.",
    ),
    option("--notice-command", ours=True, multiple=True, type=Whole(), metavar="COMMAND", help="... once the command succeeds."),
    option(
        "--notice-url",
        ours=True,
        multiple=True,
        type=Whole(),
        metavar="URL",
        help="... once the URL answers 200 (a metadata service).",
    ),
    option("--kubernetes-node", ours=True, metavar="NODE[@URL]", help="... once this Kubernetes node is cordoned or tainted."),
    option(
        "--notice-deadline",
        ours=True,
        type=click.FloatRange(0),
        default=0,
        show_default=True,
        metavar="SECONDS",
        help="So long after a notice the node gives up its ranks even if no standby is there; 0: never.",
    ),
)


def care_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these flags (``--label`` is among those that say where a host is)."""
    for flag in reversed(_OPTIONS):
        command = flag(command)
    return command
