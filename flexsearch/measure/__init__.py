"""Floor 4: measuring real machines: pieces of operators (``profiler``), devices and networks (``probe``). What is
measured becomes files that planning reads."""
