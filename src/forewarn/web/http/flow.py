"""Uvicorn's flow control with a second reason to stop reading: input that is not parsed yet."""

from uvicorn.protocols.http.flow_control import FlowControl


class Flow(FlowControl):
    """The application pauses and resumes; the connection holds and releases."""

    is_held = False

    def hold(self) -> None:
        self._change(is_paused=self.read_paused, is_held=True)

    def release(self) -> None:
        self._change(is_paused=self.read_paused, is_held=False)

    def pause_reading(self) -> None:
        self._change(is_paused=True, is_held=self.is_held)

    def resume_reading(self) -> None:
        self._change(is_paused=False, is_held=self.is_held)

    def _change(self, *, is_paused: bool, is_held: bool) -> None:
        was_reading = not (self.read_paused or self.is_held)
        self.read_paused, self.is_held = is_paused, is_held
        is_reading = not (is_paused or is_held)
        if was_reading and not is_reading:
            self._transport.pause_reading()
        elif is_reading and not was_reading:
            self._transport.resume_reading()
