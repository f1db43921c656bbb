"""Shape fuzzing: the shortest sequence of calls that shows a fault.

What torch.compile does with a shape depends on the shapes before it, so sequences of calls are drawn, not
shapes. Drawing needs Hypothesis, running a sequence needs torch; the calls themselves are plain data.
"""
