"""Prometheus' text format, for the few values that a server of ours exposes."""

from __future__ import annotations

__all__ = ["Exposition"]


class Exposition:
    """A page of samples, written in the order in which they are added."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._named: set[str] = set()

    def add(self, name: str, value: float, labels: str = "", *, help_text: str = "") -> None:
        """One sample.

        Args:
            name: the metric's; what ends in ``_total`` is a counter, everything else a gauge.
            value: of the sample.
            labels: as they stand between the braces.
            help_text: one line.
        """
        if name not in self._named:
            self._named.add(name)
            if help_text:
                self._lines.append(f"# HELP {name} {help_text}")
            kind = "counter" if name.endswith("_total") else "gauge"
            self._lines.append(f"# TYPE {name} {kind}")
        braces = f"{{{labels}}}" if labels else ""
        self._lines.append(f"{name}{braces} {value!r}")

    def text(self) -> str:
        """The page."""
        return "\n".join(self._lines) + "\n"
