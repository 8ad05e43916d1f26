"""Options that say what is written to a pool; the same for every command that has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from kvdepot.policy.admission import AdmissionSettings

__all__ = ["Admit"]


@Parameter(name="*")
@dataclass(frozen=True)
class Admit:
    """What is written.

    Attributes:
        admit: always, or second_sight: a block is written when it is computed for the second time.
        admit_tokens_min: Shorter prompts are not written.
        write_budget: Bytes that one engine may write a day, such as 500GB; 0 is no limit.
    """

    admit: Literal["always", "second_sight"] = "always"
    admit_tokens_min: int = 0
    write_budget: str = "0"

    def settings(self) -> AdmissionSettings:
        """The same as the policies want it.

        Raises:
            ConfigError: a value out of range.
        """
        from kvdepot.policy.admission import AdmissionSettings

        return AdmissionSettings.of(
            when=self.admit,
            prompt_tokens_min=self.admit_tokens_min,
            bytes_per_day=self.write_budget,
        )
