"""QSR against other synchronization schedules."""
