"""What a heartbeat says of its rank."""

from types import SimpleNamespace

from gradwire.launch.heartbeat import _frames


def test_a_frame_between_two_lines_is_told_with_its_functions_first_line():
    """Python gives f_lineno None there; such a beat was refused, and the healthy rank lost its connection."""
    code = test_a_frame_between_two_lines_is_told_with_its_functions_first_line.__code__
    frame = SimpleNamespace(f_lineno=None, f_code=code, f_back=None)
    assert _frames(frame) == [(__file__, code.co_firstlineno, code.co_qualname)]
