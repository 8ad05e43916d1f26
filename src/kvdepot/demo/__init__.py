"""The demo: one document, some questions, and a process for each way of answering them.

    document   the text that is shipped, or the user's own, checked before anything starts
    arms       what is asked in which process, and in which order
    messages   what the demo and its arms' processes say to each other
    arm        the process of one arm
    process    the demo's end of an arm's process
    run        the whole demo
    result     what is written to demo.json
    page       the same for people, as one HTML file
    show       progress and the table in the terminal

Only `arm` imports the engine, and it runs as a process of its own: the demo itself needs no torch.
"""

from __future__ import annotations

__all__: list[str] = []
