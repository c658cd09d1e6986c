"""Output of commands in bounded memory."""

from collections import deque


class BoundedOutput:
    """Retains the start and the end of a command's output, for `on_stdout` and `on_stderr`.

    :param limit: Maximum number of characters. Half of them are the start, half the end.
    """

    def __init__(self, limit: int) -> None:
        if limit < 2:
            raise ValueError(f"the limit of an output must be at least 2 characters, not {limit}")
        self._half = limit // 2
        self._start = ""
        self._end: deque[str] = deque()
        self._end_length = 0
        self.omitted = 0

    def __call__(self, text: str) -> None:
        """Appends text."""
        room = self._half - len(self._start)
        if room > 0:
            self._start += text[:room]
            text = text[room:]
        if text:
            self._end.append(text)
            self._end_length += len(text)
        while self._end_length > self._half:
            excess = self._end_length - self._half
            oldest = self._end.popleft()
            if len(oldest) > excess:
                self._end.appendleft(oldest[excess:])
            removed = min(excess, len(oldest))
            self._end_length -= removed
            self.omitted += removed

    @property
    def text(self) -> str:
        """The output. A line states the number of omitted characters."""
        note = f"\n[{self.omitted} characters omitted]\n" if self.omitted else ""
        return self._start + note + "".join(self._end)
