"""The production layer: what training and serving code imports. Torch only, never pytest.

``config`` is what it is told, ``wrap`` has ``maybe_compile``. What runs in each call of a model that it returned is in
``guarded_model``, ``graphs`` and ``backward``: each replaces what fails by the same thing run eagerly, with the help of
``dynamo``, ``later_calls``, ``graph_effects`` and ``double_backward``; ``attempt_log`` says so.
``selective`` chooses the parts, ``compiled_modules`` makes what is returned.

``smoketest`` is asked before that: ``step_runs`` runs, ``step_comparison`` and ``training_step`` judge,
``rank_votes`` keeps ranks together, and ``preservation`` puts everything back. Beside them stand ``shape_stabilizer``
(with ``padding`` and ``warmup``), ``benchmark`` (with ``benchmark_result``) and ``equivalence``, which is ``compare``.
"""
