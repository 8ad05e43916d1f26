"""A result folder's state: the plan as it was hashed, the nonce of its salts, and what is done already."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

import msgspec

from kvdepot.bench.ceilings import Ceilings, decode_ceilings, encode_ceilings
from kvdepot.bench.places import without_folders
from kvdepot.bench.plan import Arm, Plan, plan_digest
from kvdepot.bench.prompts import Material, Prompts
from kvdepot.bench.rows import Row, decode_rows, encode_row
from kvdepot.bench.windows import Window, decode_windows
from kvdepot.errors import ConfigError
from kvdepot.io.hostcounters import environment
from kvdepot.io.results import ResultFolder

__all__ = ["Session", "State", "open_session", "read_session"]

STATE, ROWS, WINDOWS, DOCUMENTS = "plan.json", "rows.jsonl", "windows.jsonl", "documents.json"
DONE = "done.jsonl"
#: the most that storage and copies give, by arm
CEILINGS = "ceilings.json"
#: requests a second that arms kept up with
SATURATION = "saturation.json"
#: bytes that the contention test's noises moved
NOISES = "noises.json"


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What is fixed before the first request."""

    schema: str = "kvdepot-bench-plan/1"
    version: str
    digest: str
    #: random, so that a plan that is run again on the same pool finds nothing of its own
    nonce: str
    began_wall_s: float
    plan: Plan
    arms: tuple[Arm, ...]
    material: str
    material_digest: str
    environment: dict[str, str]
    #: digest of plan and arms with the folders of the machine, which are not kept themselves
    places: str = ""


#: in the names of load points, and not in those of rounds
_LOAD_MARK = "/"


class _Done(msgspec.Struct, frozen=True):
    """A block that was measured to its end."""

    run: int
    arm: str
    part: str
    attempt: int


class Session:
    """A folder with its state, its rows and its windows.

    Args:
        folder: of the result.
        state: as it is kept, without folders of the machine.
        plan: as it is carried out; None: as it is kept.
        arms: as they are started; None: as they are kept.
    """

    def __init__(
        self,
        folder: ResultFolder,
        state: State,
        plan: Plan | None = None,
        arms: Sequence[Arm] | None = None,
    ) -> None:
        self.folder = folder
        self.state = state
        self.plan = state.plan if plan is None else plan
        self.arms = state.arms if arms is None else tuple(arms)
        self.windows: list[Window] = list(decode_windows(folder.lines(WINDOWS)))

    def is_done(self, run: int, arm: str, *, round_name: str) -> bool:
        """The block of this run and arm has been measured to its last round."""
        return any((d.run, d.arm, d.part) == (run, arm, round_name) for d in self.done())

    def attempt(self, run: int, arm: str) -> int:
        """How often this block was begun before."""
        attempts = [w.attempt for w in self.windows if (w.run, w.arm) == (run, arm)]
        attempts += [r.attempt for r in self.rows() if (r.run, r.arm) == (run, arm)]
        return max(attempts, default=-1) + 1

    def is_finished(self, run: int, arm: str) -> bool:
        """The rounds of this run and arm have been measured."""
        return any(
            (each.run, each.arm) == (run, arm) and _LOAD_MARK not in each.part
            for each in self.done()
        )

    def done_attempt(self, run: int, arm: str) -> int:
        """The attempt that was finished; 0 where none was."""
        done = [
            each.attempt
            for each in self.done()
            if (each.run, each.arm) == (run, arm) and _LOAD_MARK not in each.part
        ]
        return max(done, default=0)

    def mark_done(self, run: int, arm: str, part: str, attempt: int) -> None:
        """A block is finished."""
        entry = _Done(run, arm, part, attempt)
        self.folder.append(DONE, msgspec.json.encode(entry))

    def add_row(self, row: Row) -> None:
        """Write a row, now."""
        self.folder.append(ROWS, encode_row(row))

    def add_window(self, window: Window) -> None:
        """Write a window, now."""
        self.windows.append(window)
        self.folder.append(WINDOWS, msgspec.json.encode(window))

    def rows(self) -> list[Row]:
        """All rows that were written, of all attempts."""
        return list(decode_rows(self.folder.lines(ROWS)))

    def salt(self, *parts: object) -> str:
        """A salt of this result; the same parts give the same one."""
        text = "/".join(map(str, [self.state.nonce, *parts]))
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def documents(self) -> dict[int, Prompts]:
        """The documents as they were cut when the first engine told its tokens."""
        content = self.folder.read(DOCUMENTS)
        return {} if content is None else msgspec.json.decode(content, type=dict[int, Prompts])

    def keep_documents(self, documents: dict[int, Prompts]) -> None:
        """Keep them, so that a resumed run asks the very same."""
        self.folder.write(DOCUMENTS, msgspec.json.encode(documents))

    def keep_ceilings(self, arm: str, ceilings: Ceilings) -> None:
        """Keep what an arm's storage and copies give at most."""
        self.folder.write(CEILINGS, encode_ceilings({**self.ceilings(), arm: ceilings}))

    def ceilings(self) -> dict[str, Ceilings]:
        """What storage and copies give at most, by arm."""
        return decode_ceilings(self.folder.read(CEILINGS))

    def keep_noise(self, arm: str, noise: str, bytes_moved: int) -> None:
        """Keep how much foreign work was done beside an arm."""
        kept = {**self.noises(), f"{arm} {noise}": bytes_moved}
        self.folder.write(NOISES, msgspec.json.encode(kept))

    def noises(self) -> dict[str, int]:
        """Bytes of foreign work by arm and noise."""
        content = self.folder.read(NOISES)
        return {} if content is None else msgspec.json.decode(content, type=dict[str, int])

    def keep_saturation(self, arm: str, rate: float) -> None:
        """Keep the highest rate that an arm kept up with, requests a second."""
        self.folder.write(SATURATION, msgspec.json.encode({**self._saturations(), arm: rate}))

    def saturation(self, arm: str) -> float:
        """That rate; 0 where it was not looked for."""
        return self._saturations().get(arm, 0.0)

    def _saturations(self) -> dict[str, float]:
        content = self.folder.read(SATURATION)
        return {} if content is None else msgspec.json.decode(content, type=dict[str, float])

    def done(self) -> list[_Done]:
        """The blocks that were measured to their end."""
        lines = self.folder.lines(DONE)
        return [msgspec.json.decode(line, type=_Done) for line in lines if line.endswith(b"}")]


def open_session(
    folder: ResultFolder,
    plan: Plan,
    arms: Sequence[Arm],
    material: Material,
    *,
    version: str,
    wall_s: float,
) -> Session:
    """Begin a result, or go on with one that was interrupted.

    Raises:
        ConfigError: the folder holds the result of another plan, or of the same one in other folders.
    """
    places = plan_digest(plan, arms, material.digest)
    out = folder.path.resolve()
    kept_plan = without_folders(plan, out)
    kept_arms = tuple(without_folders(arm, out) for arm in arms)
    digest = plan_digest(kept_plan, kept_arms, material.digest)
    kept = folder.read(STATE)
    if kept is not None:
        state = _decoded(kept, str(folder.path))
        if state.digest != digest:
            raise ConfigError(
                f"{folder.path} holds the result of another plan ({state.digest[:12]}, this one is "
                f"{digest[:12]})",
                hint="give an empty folder: --out; to go on with a result, run it with the same plan",
            )
        if state.places != places:
            raise ConfigError(
                f"{folder.path} was begun with a pool, a model or another folder elsewhere",
                hint="to go on with a result, name the same folders; else give an empty one: --out",
            )
        return Session(folder, state, plan, arms)
    state = State(
        version=version,
        digest=digest,
        nonce=secrets.token_hex(8),
        began_wall_s=wall_s,
        plan=kept_plan,
        arms=kept_arms,
        material=material.name,
        material_digest=material.digest,
        environment=environment(),
        places=places,
    )
    folder.write(STATE, msgspec.json.format(msgspec.json.encode(state), indent=1))
    return Session(folder, state, plan, arms)


def read_session(folder: ResultFolder) -> Session:
    """A result that is there.

    Raises:
        ConfigError: there is none.
    """
    kept = folder.read(STATE)
    if kept is None:
        raise ConfigError(f"{folder.path} holds no result of kvdepot bench")
    return Session(folder, _decoded(kept, str(folder.path)))


def _decoded(content: bytes, source: str) -> State:
    try:
        return msgspec.json.decode(content, type=State)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{source}/{STATE} cannot be read: {error}") from error
