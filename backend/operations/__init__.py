"""Operations: sequence, gradient window, journal, schedule, execution."""
