"""QSR compared with other synchronization schedules."""
