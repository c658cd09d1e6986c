"""Module `jiffy_kernel` in each Python kernel: imports libraries in advance, adds display formats, limits output."""

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
# Maximum bytes that one execution may write. Jupyter's messages have no flow control: they are
# queued in the sandbox's memory and then dropped.
MAX_OUTPUT = 64 << 20
# Bytes not yet sent above which a writer waits.
MAX_UNSENT = 1 << 20
# Maximum pixels of a picture that is displayed because it was saved.
MAX_PIXELS = 32 << 20
# Maximum cells of a table that is also returned as data.
MAX_CELLS = 100_000
# Font with the characters of Chinese, Japanese and Korean.
FALLBACK_FONT = "WenQuanYi Micro Hei"

_saved = {}
_written = 0


def set_up(shell):
    """Imports the libraries and draws a first picture, so that the client's code does not wait for them."""
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
        # Formatters are registered as methods, because `%matplotlib inline` removes all functions
        # that are registered for figures.
        _add_format(shell, matplotlib.figure.Figure, "chart", charts.chart_of)
        _add_format(shell, pandas.DataFrame, "data", table)
        figure = plt.figure()
        figure.gca().plot([0, 1], [0, 1])
        shell.display_formatter.format(figure)
        plt.close(figure)
        shell.display_formatter.format(pandas.DataFrame({"a": numpy.zeros(1)}))
    except ImportError:
        # The client's template may lack one of the libraries.
        pass
    del shell.user_ns["_dh"][1:]


def _charts():
    spec = importlib.util.spec_from_file_location("jiffy_charts", os.path.join(HERE, "charts.py"))
    module = sys.modules["jiffy_charts"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _add_fallback_font():
    """Makes matplotlib draw characters that are missing in a chart's fonts with FALLBACK_FONT, for all styles."""
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
    """Displays pictures of PIL as results when they are shown or saved to a file: a sandbox has no screen."""
    import PIL.Image
    import PIL.ImageShow

    class Displayed(PIL.ImageShow.Viewer):
        def show(self, image, **options):
            _display(image)
            return 1

    # Registered before the viewers that start a program with a window.
    PIL.ImageShow.register(Displayed(), 0)
    save = PIL.Image.Image.save

    @functools.wraps(save)
    def displayed(self, fp, *args, **kwargs):
        saved = save(self, fp, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        # matplotlib saves figures through PIL, and the figure itself is displayed already.
        if isinstance(fp, (str, os.PathLike)) and not caller.startswith("matplotlib."):
            _display(self)
        return saved

    PIL.Image.Image.save = displayed


def _display(image):
    from IPython.display import publish_display_data

    if image.width * image.height > MAX_PIXELS:
        return
    try:
        png = image._repr_png_()
    except Exception:
        # PNG does not support this pixel format.
        png = None
    if png:
        encoded = base64.b64encode(png).decode("ascii")
        publish_display_data({"text/plain": repr(image), "image/png": encoded})


def _add_format(shell, kind, name, function):
    """Adds `function`'s result to the representations of values of class `kind`."""
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
    """Returns `function` with exceptions replaced by `None`, so that the other representations are still shown."""

    def guarded(value):
        try:
            return function(value)
        except Exception:
            return None

    return guarded


def plain(value):
    """Converts a value to JSON types."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (datetime.date, datetime.time)):
        # Includes pandas' timestamps. Pandas' "not a time" is not equal to itself.
        return value.isoformat() if value == value else None
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return plain(value.item())
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(v) for v in value]
    return str(value)


def table(frame):
    """Converts a data frame to a dictionary from column to values. Returns `None` above MAX_CELLS."""
    if frame.size > MAX_CELLS:
        return None
    return {str(name): [plain(v) for v in frame.iloc[:, i].tolist()] for i, name in enumerate(frame.columns)}


def _limit_output():
    """Makes printing wait while more than MAX_UNSENT bytes are unsent, and truncates output at MAX_OUTPUT."""
    from ipykernel.iostream import OutStream

    write = OutStream.write
    pending = {}

    def limited(self, text):
        global _written
        if not isinstance(text, str):
            return write(self, text)
        if _written > MAX_OUTPUT:
            return len(text)
        _written += len(text)
        if _written > MAX_OUTPUT:
            return write(self, f"\n[output truncated after {MAX_OUTPUT >> 20} MiB]\n")
        done = write(self, text)
        pending[self.name] = pending.get(self.name, 0) + len(text)
        if pending[self.name] > MAX_UNSENT:
            pending[self.name] = 0
            self.flush()
        return done

    OutStream.write = limited


def begin(env):
    """Sets the environment variables of an execution. Called before it."""
    global _written
    end()
    _written = 0
    for key, value in env.items():
        _saved[key] = os.environ.get(key)
        os.environ[key] = value


def end():
    """Restores the environment variables. Called after an execution."""
    for key, value in _saved.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value
    _saved.clear()


def adopt(reseed, env, dropped):
    """Adapts the kernel to a new sandbox identity after its memory was cloned."""
    end()
    for key in dropped:
        os.environ.pop(key, None)
    os.environ.update(env)
    # The variables may include the time zone.
    time.tzset()
    if not reseed:
        return
    random.seed(os.urandom(32))
    ssl.RAND_add(os.urandom(64), 64.0)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(list(os.urandom(32)))
