"""The graph that is being built or traced: the names of its operations, and what it has to hold to because of them.

Operations of graphs are matched by name, because TensorFlow runs the nodes of a graph in any order. A name that the
caller does not give is made of the place of the call (file, line, function), of the tf.function that is traced, and of
how many times that place has added an operation to this function. Branches and the bodies of loops, which have graphs
of their own, count with the function in which they are. TensorFlow's own names are not used: they change when a rank
traces one function more than the others, or traces one again.

XLA can compile no node of ours. A tf.function with jit_compile=True that adds one is traced without XLA, and a line
says so. In a loop, an operation has the same name in each turn, and in a tf.function in each call. In a tf.function
that is called eagerly, turns and calls come one after the other, because TensorFlow waits for all nodes of ours at the
end of each. In a graph of a session they may overtake each other, so there a loop has to say parallel_iterations=1, and
functions that communicate are refused.
"""

from __future__ import annotations

import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import tensorflow as tf

from ronde.comm.world import current_world

logger = logging.getLogger("ronde.tensorflow")

AUTOGRAPH_FILE = "__autograph_generated_file"
AUTOGRAPH_PREFIX = "tf__"

_PACKAGES = tuple(f"{Path(sys.modules[name].__file__ or '').parent}/" for name in ("ronde", "tensorflow"))
"""Files that are not the caller's: a name made of a line in them would say nothing."""

BRANCH_GRAPHS = ("CondBranchFuncGraph", "WhileCondFuncGraph", "WhileBodyFuncGraph")
"""TensorFlow's classes of graphs that are a part of a function: branches, and conditions and bodies of loops."""


class GraphNames:
    """The names of the operations in the graph of a function or of a session."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.inside: set[str] = set()
        """Names of operations in functions that were traced while this graph was built."""


# What these hold must not hold the graph, or no graph would ever be freed.
_single_calls: WeakKeyDictionary[Any, WeakSet[Any]] = WeakKeyDictionary()
_names: WeakKeyDictionary[Any, GraphNames] = WeakKeyDictionary()

_Function = TypeVar("_Function", bound=Callable[..., Any])


def without_autograph(function: _Function) -> _Function:
    """A decorator of functions that users call while a graph is built: AutoGraph leaves them as they are."""
    converted: _Function = tf.autograph.experimental.do_not_convert(function)
    return converted


# --- names -----------------------------------------------------------------------------------------------------------


def find_call_site() -> str:
    """Where ronde was called, as file:line:function. Of code that AutoGraph has converted, the file is not part of it:
    its name is another one in each process.

    If it is Keras that has called, as a layer of ronde's, the place is in Keras: fit() may be called in other lines on
    each rank.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame = frame.f_back
    found = frame
    while found.f_back is not None and found.f_code.co_filename.startswith("<"):  # made while the program runs
        found = found.f_back
    if found.f_code.co_filename.startswith("<"):
        found = frame  # a program without files
    code = found.f_code
    file, function = Path(code.co_filename).name, code.co_name
    if file.startswith(AUTOGRAPH_FILE):
        file, function = "autograph", function.removeprefix(AUTOGRAPH_PREFIX)
    return f"{file}:{found.f_lineno}:{function}"


def unique_in_graph(base: str, *, is_given: bool) -> str:
    """The name that an operation gets in the graph that is being built: equal on all ranks that build the same graph,
    and not that of another operation in the same step.

    A name that the caller has given stays as it is if it is the only one. One that was made of a place in the code is
    completed by the name of the function that is traced, because a function may be traced in another one or before.
    """
    graphs = _find_function_graphs()
    own, *outer = [_names.setdefault(graph, GraphNames()) for graph in graphs]
    function = _name_of_function(graphs)
    name = base
    if is_given:
        if base in own.inside or any(base in each.counts for each in outer):
            name = f"{base} in {function or 'graph'}"
    elif function:
        name = f"{base} in {function}"
    for each in outer:
        each.inside.add(base)
    # The functions of a session's graph may run at the same time, so names are counted in the whole of it.
    counts = own.counts if tf.compat.v1.executing_eagerly_outside_functions() or not outer else outer[-1].counts
    number = counts[name]
    counts[name] += 1
    return f"{name}#{number}" if number else name


def _find_function_graphs() -> list[Any]:
    """The graph of the function or of the session that is being built, and those around it."""
    found: list[Any] = []
    graph, is_eager = tf.compat.v1.get_default_graph(), tf.compat.v1.executing_eagerly_outside_functions()
    while graph is not None and (graph.building_function or not is_eager):
        if not any(each.__name__ in BRANCH_GRAPHS for each in type(graph).__mro__):
            found.append(graph)
        graph = getattr(graph, "outer_graph", None)
    return found or [tf.compat.v1.get_default_graph()]


def _name_of_function(graphs: Sequence[Any]) -> str:
    """The name of the function whose graph is the first; empty if it is that of a session. If it is traced in another
    function of that name, it has a number."""
    names = [re.sub(r"_\d+$", "", graph.name) for graph in graphs if graph.building_function]
    if not graphs[0].building_function:
        return ""
    number = names.count(names[0]) - 1
    return f"{names[0]}.{number}" if number else names[0]


def operation_name(kind: str, name: str | None) -> str:
    """The name of an operation in the graph that is being built: the caller's, or one made of the place of the call. A
    name that is in the graph already gets a number, because TensorFlow may run the two in any order."""
    return unique_in_graph(name or f"{kind} {find_call_site()}", is_given=bool(name))


def backward_name(name: str | None) -> str | None:
    """The name of an operation that computes the gradient of the one with this name; None of an eager one without. The
    gradient of an eager operation that a function computes later is known by the place of that call."""
    if not name:
        return None if tf.executing_eagerly() else operation_name("backward", None)
    backward = f"{name}.backward"
    return backward if tf.executing_eagerly() else unique_in_graph(backward, is_given=True)


# --- XLA and loops ---------------------------------------------------------------------------------------------------

FUNCTION_CLASS: type = type(tf.function(lambda: None))
MUST_COMPILE = "_XlaMustCompile"
"""The attribute of a function that TensorFlow compiles with XLA as a whole."""
VECTORIZING_FILE = "parallel_for/control_flow_ops.py"
"""Where TensorFlow traces functions that are vectorized."""
TRACING_OPTIONS = ("_variable_creation_config", "_no_variable_creation_config")
"""Where a tf.function keeps the attributes that its next traced functions get."""


def prepare_graph(*, communicates: bool) -> None:
    """Prepare the graph that is being built for a node of ours. Functions that are being traced for XLA are traced
    without it from here on, and a node that communicates is refused where ranks could mistake one turn of a loop for
    another."""
    for function in _find_traced_functions():
        if getattr(function, "_jit_compile", False):
            _switch_off_xla(function)
    _run_turns_in_order()
    if communicates:
        _refuse_turns_at_once()
    if communicates and not tf.compat.v1.executing_eagerly_outside_functions():
        _check_order()


def _refuse_turns_at_once() -> None:
    """Raise if the operation that is being added is in a function whose turns tf.vectorized_map makes one of, and runs
    at once where that is not possible."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "_pfor_impl" and frame.f_code.co_filename.endswith(VECTORIZING_FILE):
            raise ValueError(
                "an operation that communicates is in a function of tf.vectorized_map or in a jacobian, whose turns "
                "may overtake each other, so that ranks would mix up their numbers; use tf.map_fn, or call the "
                "operation on the whole tensor, and compute jacobians with experimental_use_pfor=False"
            )


def _check_order() -> None:
    """Raise if the operation that is being added to the graph of a session could run several times in any order: in a
    loop whose turns may overtake each other, or in a function that is called several times."""
    for function in _find_traced_functions():
        _allow_one_call(function)
    if tf.compat.v1.get_default_graph() is _find_function_graphs()[0]:
        return  # its loops are nodes of its own, see _run_turns_in_order()
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "while_loop" and frame.f_locals.get("parallel_iterations", 1) != 1:
            raise ValueError(
                "an operation that communicates is in a loop of a session's graph whose turns may overtake each other, "
                "so that ranks would mix up their numbers; pass parallel_iterations=1 to tf.while_loop, tf.scan or "
                "tf.map_fn"
            )


def _allow_one_call(function: Any) -> None:
    """Let a tf.function that communicates be called once in each graph of a session."""
    if function in _single_calls:
        return
    graphs = _single_calls.setdefault(function, WeakSet())
    graphs.add(_find_function_graphs()[-1])
    call = function._call

    def call_once(*args: Any, **kwargs: Any) -> Any:
        if not tf.compat.v1.executing_eagerly_outside_functions():
            graph = _find_function_graphs()[-1]
            if graph in graphs:
                raise ValueError(
                    f"the tf.function {getattr(function, '__name__', '')!r}, which communicates, is called twice in a "
                    "session's graph, which runs the calls in any order, so that ranks would mix up their numbers; "
                    "leave @tf.function away there, or run the function eagerly"
                )
            graphs.add(graph)
        return call(*args, **kwargs)

    function._call = call_once


def _find_traced_functions() -> list[Any]:
    """The tf.functions that are being traced by this thread, the innermost first. Keras 2 has graphs of functions that
    belong to no tf.function, to try a layer out."""
    found: list[Any] = []
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name in ("__call__", "_call", "_initialize", "get_concrete_function"):
            owner = frame.f_locals.get("self")
            if isinstance(owner, FUNCTION_CLASS) and not any(owner is each for each in found):
                found.append(owner)
    return found


def _switch_off_xla(function: Any) -> None:
    """Let a tf.function be traced without XLA, also the trace that is under way: TensorFlow reads the attributes of
    a traced function when its trace is complete."""
    name = getattr(function, "__name__", "a function")
    options = [each for attribute in TRACING_OPTIONS if (each := getattr(function, attribute, None)) is not None]
    if not options or not all(isinstance(each.attributes, dict) for each in options):
        raise NotImplementedError(
            f"{name!r} is a tf.function with jit_compile=True that communicates, which XLA cannot compile; leave "
            "jit_compile away there, and use it for functions inside of it that do not communicate"
        )
    for each in options:
        each.attributes[MUST_COMPILE] = False
    function._jit_compile = False
    if current_world("an operation in a TensorFlow graph").rank == 0:
        logger.warning(
            "jit_compile=True of the tf.function %r is switched off, because XLA cannot compile an operation that "
            "communicates; functions inside of it that do not communicate can be compiled",
            name,
        )


# --- loops -----------------------------------------------------------------------------------------------------------


def _run_turns_in_order() -> None:
    """Let the loops that are being built around the next node run their turns one after the other. Each turn has an
    operation of the same name, and TensorFlow may run several at once (parallel_iterations). Loops of tf.function do so
    by themselves, because a node here has effects; those of a session's graph have nodes that say how many."""
    graph = tf.compat.v1.get_default_graph()
    context = graph._get_control_flow_context()
    while context is not None:
        if getattr(context, "parallel_iterations", 1) > 1:
            one = tf.compat.v1.AttrValue(i=1)
            for node in graph.get_operations():
                if node.type in ("Enter", "RefEnter") and node.get_attr("frame_name") == context.name.encode():
                    node._set_attr("parallel_iterations", one)
            context._parallel_iterations = 1  # of the nodes that are still to be added
        context = context.outer_context
