"""Trainers: engines that compute losses, gradients and optimiser steps."""
