"""One function a catalogue row, each registered under its id: the smallest change that brings the defect back."""
