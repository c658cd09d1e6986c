"""Runs inside each Python kernel, as the module `jiffy_kernel`: what is imported beforehand, what is shown, what is limited."""

import base64
import datetime
import functools
import importlib.util
import math
import os
import random
import ssl
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
# Most bytes that one execution may write. The messages have no other brake than being dropped, and
# memory is the sandbox's.
MOST_OUTPUT = 64 << 20
# Bytes that wait to be sent from which on whoever writes waits as well.
UNSENT = 1 << 20
# Most pixels of a picture that is shown because it was saved.
MOST_PIXELS = 32 << 20
# Most cells of a table that is also given as data.
MOST_CELLS = 100_000
# Font with the characters of Chinese, Japanese and Korean.
FALLBACK_FONT = "WenQuanYi Micro Hei"

_saved = {}
_written = 0


def set_up(shell):
    """Warms the kernel up: from here on imports cost nothing, nor does the first picture."""
    _limit_output()
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != HERE]
    try:
        shell.run_line_magic("matplotlib", "inline")
        import matplotlib.figure
        import matplotlib.pyplot as plt
        import numpy
        import pandas

        _show_images()
        _add_fallback_font()
        charts = _charts()
        charts.watch()
        # As methods, because `%matplotlib inline` takes away all functions that are registered for
        # figures.
        _add_format(shell, matplotlib.figure.Figure, "chart", charts.chart_of)
        _add_format(shell, pandas.DataFrame, "data", table)
        figure = plt.figure()
        figure.gca().plot([0, 1], [0, 1])
        shell.display_formatter.format(figure)
        plt.close(figure)
        shell.display_formatter.format(pandas.DataFrame({"a": numpy.zeros(1)}))
    except ImportError:
        # A sandbox without one of them is a sandbox.
        pass
    del shell.user_ns["_dh"][1:]


def _charts():
    spec = importlib.util.spec_from_file_location("jiffy_charts", os.path.join(HERE, "charts.py"))
    module = sys.modules["jiffy_charts"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _add_fallback_font():
    """Draws characters that a chart's fonts lack in FALLBACK_FONT, whatever styles say about fonts."""
    from matplotlib import font_manager

    find = getattr(font_manager.FontManager, "_find_fonts_by_props", None)
    try:
        fallback = font_manager.findfont(FALLBACK_FONT, fallback_to_default=False)
    except ValueError:
        return
    if find is None:
        return

    @functools.wraps(find)
    def with_fallback(self, *args, **kwargs):
        paths = find(self, *args, **kwargs)
        return paths if fallback in paths else [*paths, fallback]

    font_manager.FontManager._find_fonts_by_props = with_fallback


def _show_images():
    """Has pictures of PIL that are shown, or saved to a file, displayed as results: there is no screen."""
    import PIL.Image
    import PIL.ImageShow

    class Displayed(PIL.ImageShow.Viewer):
        def show(self, image, **options):
            _display(image)
            return 1

    # Before those that look for a program with a window.
    PIL.ImageShow.register(Displayed(), 0)
    save = PIL.Image.Image.save

    @functools.wraps(save)
    def displayed(self, fp, *args, **kwargs):
        saved = save(self, fp, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        # A figure that is saved is a picture, too, and shown as one already.
        if isinstance(fp, (str, os.PathLike)) and not caller.startswith("matplotlib."):
            _display(self)
        return saved

    PIL.Image.Image.save = displayed


def _display(image):
    from IPython.display import publish_display_data

    if image.width * image.height > MOST_PIXELS:
        return
    try:
        png = image._repr_png_()
    except Exception:
        # Of a kind that PNG has not.
        png = None
    if png:
        encoded = base64.b64encode(png).decode("ascii")
        publish_display_data({"text/plain": repr(image), "image/png": encoded})


def _add_format(shell, kind, name, function):
    """Has values of class `kind` shown as data, too."""
    from IPython.core.formatters import BaseFormatter
    from traitlets import ObjectName, Unicode

    mime, method = f"application/vnd.jiffy.{name}+json", f"_repr_jiffy_{name}_"

    class Formatter(BaseFormatter):
        format_type = Unicode(mime)
        print_method = ObjectName(method)
        _return_type = dict

    setattr(kind, method, _harmless(function))
    display = shell.display_formatter
    display.formatters[mime] = Formatter(parent=display)
    display.active_types = list(display.active_types) + [mime]


def _harmless(function):
    """A representation that cannot be made is none; the others say what there is to say."""

    def guarded(value):
        try:
            return function(value)
        except Exception:
            return None

    return guarded


def plain(value):
    """A value as JSON has it."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (datetime.date, datetime.time)):
        # Also pandas' timestamps; "not a time" is none.
        return value.isoformat() if value == value else None
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return plain(value.item())
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(v) for v in value]
    return str(value)


def table(frame):
    """A data frame as column -> values."""
    if frame.size > MOST_CELLS:
        return None
    return {str(name): [plain(v) for v in frame.iloc[:, i].tolist()] for i, name in enumerate(frame.columns)}


def _limit_output():
    """What is printed waits while much is unsent, and is cut off at the limit."""
    from ipykernel.iostream import OutStream

    write = OutStream.write
    pending = {}

    def limited(self, text):
        global _written
        if not isinstance(text, str):
            return write(self, text)
        if _written > MOST_OUTPUT:
            return len(text)
        _written += len(text)
        if _written > MOST_OUTPUT:
            return write(self, f"\n[output cut off after {MOST_OUTPUT >> 20} MiB]\n")
        done = write(self, text)
        pending[self.name] = pending.get(self.name, 0) + len(text)
        if pending[self.name] > UNSENT:
            pending[self.name] = 0
            self.flush()
        return done

    OutStream.write = limited


def begin(env):
    """Before an execution: its own variables."""
    global _written
    end()
    _written = 0
    for key, value in env.items():
        _saved[key] = os.environ.get(key)
        os.environ[key] = value


def end():
    """After it: the variables as they were."""
    for key, value in _saved.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value
    _saved.clear()


def adopt(reseed, env, dropped):
    """Another sandbox's life begins, in a copy of this memory."""
    end()
    for key in dropped:
        os.environ.pop(key, None)
    os.environ.update(env)
    # The time zone may be among them.
    time.tzset()
    if not reseed:
        return
    random.seed(os.urandom(32))
    ssl.RAND_add(os.urandom(64), 64.0)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(list(os.urandom(32)))
