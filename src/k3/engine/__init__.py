"""When things happen: weights and experts bound to storage, the step, generation, sampling, reports."""
