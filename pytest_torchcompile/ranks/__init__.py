"""Who runs where: rank processes, the zygote that forks them, and leases of GPUs.

Read ``execution`` first: it has a cell run and keeps its result. Pytest's end of a process is ``rank``, and
``rank_group`` the ranks of one cell and what they recorded (``torchrun``: over several nodes). A rank's own end is
``serving``, with the threads of ``listeners``. ``starting`` chooses what it is: a fork of the ``zygote``, which
``zygotes`` starts, or on macOS and Windows a process of its own (``fresh``, by ``message_frames``). ``gpus`` are
those of this machine, and ``leases`` says which cells hold which.
"""
