"""Ready training programs: a configuration, a task, a loop read top to bottom, a report."""
