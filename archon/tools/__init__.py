"""Tools of the command: benchmark, planner, doctor, family checks and reports."""
