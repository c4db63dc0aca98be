"""What is told of a thread."""

from types import SimpleNamespace

from gradwire.launch import stacks


def test_a_frame_between_two_lines_is_told_with_its_functions_first_line(monkeypatch):
    """Python gives f_lineno None there; such a beat was refused, and the healthy rank lost its connection."""
    code = test_a_frame_between_two_lines_is_told_with_its_functions_first_line.__code__
    frame = SimpleNamespace(f_lineno=None, f_code=code, f_back=None)
    monkeypatch.setattr(stacks.sys, "_current_frames", lambda: {7: frame})
    assert stacks.thread_stack(7) == [(__file__, code.co_firstlineno, code.co_qualname)]
