"""The switches: environment variables of this package, read here and nowhere else.  `python -m refimpl doctor` shows them."""
import os
from dataclasses import dataclass
from typing import Any, Callable

PREFIX = "REFIMPL_"


@dataclass(frozen=True)
class Settings:
    """What the switches say; without any, this."""
    checked: bool = True
    timeout: float = 300.0
    cuda_aware: bool = False


def flag(text: str) -> bool:
    return {"0": False, "1": True}[text]


def seconds(text: str) -> float:
    value = float(text)
    if not value > 0:                                   # nan is not, either
        raise ValueError
    return value


@dataclass(frozen=True)
class Switch:
    """The variable REFIMPL_X of the field x of `Settings`."""
    field: str
    allowed: str
    meaning: str
    parse: Callable[[str], Any]                         # Error: ValueError or KeyError

    @property
    def name(self) -> str:
        return PREFIX + self.field.upper()

    @property
    def default(self) -> str:
        return f"{getattr(Settings(), self.field):g}"

    @property
    def text(self) -> str:
        """What the variable says, "" where it is not set."""
        return os.environ.get(self.name, "")

    def value(self) -> Any:
        """Error: ValueError, a sentence."""
        try:
            return self.parse(self.text or self.default)
        except (ValueError, KeyError):
            raise ValueError(f"{self.name}={self.text} is not {self.allowed} ({self.meaning}; default "
                             f"{self.default})") from None


SWITCHES = (
    Switch("checked", "0 or 1", "whether the ranks compare what they are about to do before each collective", flag),
    Switch("timeout", "a number of seconds above 0, or inf",
           "seconds that a rank waits in a collective before the absent ones are a fault", seconds),
    Switch("cuda_aware", "0 or 1", "whether MPI is handed GPU arrays as they are, and not by way of the host", flag),
)


def read_switches() -> Settings:
    """Error: ValueError, a sentence, where a variable has a value that it does not take, or there is no such switch."""
    for name in unknown_switches():
        raise ValueError(f"{name} is not a switch: there are {', '.join(s.name for s in SWITCHES)}")
    return Settings(**{s.field: s.value() for s in SWITCHES})


def unknown_switches() -> list[str]:
    """Variables that are named like switches and are none."""
    return [name for name in sorted(os.environ) if name.startswith(PREFIX) and name not in {s.name for s in SWITCHES}]


def switches_set() -> str:
    """The variables that are set, as in a shell: what all ranks must have alike."""
    return " ".join(f"{name}={text}" for name, text in sorted(os.environ.items()) if name.startswith(PREFIX) and text)
