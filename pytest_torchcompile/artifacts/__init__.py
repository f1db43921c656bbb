"""What is shipped: one process compiles a model, another takes what it has left and runs it. Is it still the model?

A *route* is one way to ship: a warm cache folder, torch's cache artifacts, ``aot_compile``, AOTInductor's package.
Routes whose artifact holds compiled code itself have dropped guards, so they are also called as a caller may call and
the author did not: another size, dtype, layout, flag. Eager's answer is right then, and a refusal is; another is not.

Read ``route`` (what one is), any file of ``routes/``, and ``shipping`` (the two processes, and what they came to).
"""
