"""What a model can do on problems with known answers: sampling, grading and the estimators on top."""
