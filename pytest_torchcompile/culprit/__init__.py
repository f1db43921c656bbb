"""The culprit: from "gradient of w differs, stage inductor" to the operator, its line, and a script of a few lines.

It is asked for, and for failing models alone: it compiles many times.

Read ``culprit_record`` (what is told; no torch), ``culprit_search`` (the way there), ``captured_graph`` (Dynamo's
graphs with their real inputs), ``graph_trial`` (the oracle's verdict of a graph), ``graph_shrinking`` (torch's
minifier), ``compiler_bisection`` (torch's bisector, where a compiler is to blame), ``operator_notes`` and
``wrong_operator`` (each operator held against float64 and eager's, where AOTAutograd is), ``operator_script`` and
``lone_script`` (each script is run with torch alone).
"""
