"""Recursive least squares with forgetting for a time that is a sum of three terms, each at least nought.

The method is the textbook's (Ljung, System Identification, 11.2; Huber 1964 for the clipping), with what a live engine
needs. Errors are relative, since noise grows with the time itself. An error is clipped at three times the noise seen
lately, and further out where the fit itself is unsure, so that one run that was stuck for a minute says next to nothing.
The first few runs only tell by what factor the start was wrong: their median. Many in a row that are far off to the same
side are news: the fit moves by their mean ratio and is open again. What nothing excites is forgotten up to the doubt of
the start and no further, so it cannot wind up. Where a term would be negative the best fit without it is taken.
"""

from math import exp, log, sqrt
from statistics import median
from typing import Annotated

from msgspec import Meta, Struct

FORGETTING = 0.99
CLIP = 3.0  # times the noise
NOISE_START, NOISE_MIN, NOISE_MAX = 0.15, 0.01, 1.0  # relative
NOISE_RATE_MIN = 0.02
DOUBT = 10.0  # at the start a term may be off by so many times the noise, in units of its own span
DOUBT_CLIP_MAX = 10.0  # the clip is not widened by more than this
LOOSENED = 0.002  # of the doubt of the start: the next few runs count for a quarter each
FAR = 0.25  # less than that is followed without fuss
SURPRISES = 8  # in a row
FIRST = 5  # runs that tell by what factor the start was wrong
TERM_MAX = 1e8
_SMALL = 1e-12

Three = tuple[float, float, float]
Six = tuple[float, float, float, float, float, float]
Variance = Annotated[float, Meta(gt=0)]
Term = Annotated[float, Meta(ge=0, le=TERM_MAX)]
Logarithm = Annotated[float, Meta(ge=-50, le=50)]


class FitState(Struct, frozen=True):
    """How sure a fit is.

    Attributes:
        noise: Relative error of a single run, lately.
        runs: How many it has learned from.
        surprises: Runs in a row that were far off: above (positive) or below.
        surprise: Sum of the logarithms of their ratios.
        bounds: Variance of each term that is not exceeded.
        covariance: Of the terms, in units of the noise: 11, 12, 13, 22, 23, 33.
        start: The terms that it began with.
        first: Logarithms of what the first runs took over that.
    """

    noise: Annotated[float, Meta(ge=NOISE_MIN, le=NOISE_MAX)]
    runs: Annotated[int, Meta(ge=0)]
    surprises: Annotated[int, Meta(ge=-SURPRISES, le=SURPRISES)]
    surprise: Annotated[float, Meta(ge=-400, le=400)]
    bounds: tuple[Variance, Variance, Variance]
    covariance: Six
    start: tuple[Term, Term, Term]
    first: Annotated[list[Logarithm], Meta(max_length=FIRST)]


class Fit:
    """Learns t = x1 y1 + x2 y2 + x3 y3 from pairs of (y, t); `terms` are the x.

    Args:
        terms: What is believed at the start, in milliseconds.
        reference: A usual y, at which the start tells how large the terms may be.
        spans: How large each term may be, as a share of the time at the reference.
        floor_ms: Times below this are taken as this where an error is put in relation.
    """

    __slots__ = (
        "_bounds",
        "_first",
        "_floor_ms",
        "_p",
        "_reference",
        "_spans",
        "_start",
        "_surprise",
        "_surprises",
        "noise",
        "runs",
        "terms",
    )

    def __init__(self, terms: Three, reference: Three, spans: Three, floor_ms: float) -> None:
        self._reference, self._spans, self._floor_ms = reference, spans, floor_ms
        self._bounds: Three
        self._p: Six
        self.reset(terms)

    def reset(self, terms: Three) -> None:
        """Believe only this, and doubt it as at the start."""
        self.terms = self._start = terms
        self._first: list[float] = []
        self.runs = 0
        self._open()

    def loosen(self) -> None:
        """Be more ready to move, as after a restart that may have changed something."""
        p11, p12, p13, p22, p23, p33 = self._p
        b1, b2, b3 = self._bounds
        self._p = p11 + LOOSENED * b1, p12, p13, p22 + LOOSENED * b2, p23, p33 + LOOSENED * b3
        self._bound()

    def observe(self, y: Three, time_ms: float, weight: float = 1.0) -> bool:
        """Learn from one run.

        Args:
            y: What the terms are multiplied with; finite, not negative.
            time_ms: What it took; finite, not negative.
            weight: How much it tells, in (0, 1].

        Returns:
            Whether this was one surprise too many in a row: the fit has moved to where they lie, and is open again.
        """
        if len(self._first) < FIRST:
            self._find_level(y, time_ms)
            return False
        t1, t2, t3 = self.terms
        believed_ms = t1 * y[0] + t2 * y[1] + t3 * y[2]
        level_ms = max(believed_ms, self._floor_ms)
        u1, u2, u3 = y[0] / level_ms, y[1] / level_ms, y[2] / level_ms
        p11, p12, p13, p22, p23, p33 = self._p
        g1, g2, g3 = p11 * u1 + p12 * u2 + p13 * u3, p12 * u1 + p22 * u2 + p23 * u3, p13 * u1 + p23 * u2 + p33 * u3
        doubt = max(u1 * g1 + u2 * g2 + u3 * g3, 0.0)
        single = 1.0 / weight
        error = (time_ms - believed_ms) / level_ms
        sigmas = sqrt(single + doubt)
        limit = CLIP * self.noise * min(sigmas, DOUBT_CLIP_MAX)
        size = abs(error)
        self._learn_noise(size / sigmas, single / (single + doubt))
        self.runs += 1
        if self._is_surprised(size > max(limit, FAR), error, max(time_ms, self._floor_ms) / level_ms):
            return True
        excess = max(size / limit, 1.0) ** 2
        gain = min(max(error, -limit), limit) / (FORGETTING * single + doubt)
        self.terms = t1 + g1 * gain, t2 + g2 * gain, t3 + g3 * gain
        shrink = 1.0 / (FORGETTING * single * excess + doubt)  # an outlier makes us no surer
        self._p = (
            (p11 - g1 * g1 * shrink) / FORGETTING,
            (p12 - g1 * g2 * shrink) / FORGETTING,
            (p13 - g1 * g3 * shrink) / FORGETTING,
            (p22 - g2 * g2 * shrink) / FORGETTING,
            (p23 - g2 * g3 * shrink) / FORGETTING,
            (p33 - g3 * g3 * shrink) / FORGETTING,
        )
        self._bound()
        self._keep_sane()
        return False

    def state(self) -> FitState:
        """Give all that `terms` do not tell."""
        return FitState(
            self.noise, self.runs, self._surprises, self._surprise, self._bounds, self._p, self._start, list(self._first)
        )

    def restore(self, terms: Three, state: FitState) -> None:
        """Go on from what `terms` and `state` told."""
        self.terms, self._bounds, self._p = terms, state.bounds, state.covariance
        self.noise, self.runs, self._start, self._first = state.noise, state.runs, state.start, list(state.first)
        self._surprises, self._surprise = state.surprises, state.surprise
        self._bound()
        self._keep_sane()

    def _open(self) -> None:
        """Doubt the terms as at the start."""
        usual_ms = max(sum(t * y for t, y in zip(self.terms, self._reference, strict=True)), self._floor_ms)
        b1, b2, b3 = ((DOUBT * max(t, usual_ms * s)) ** 2 for t, s in zip(self.terms, self._spans, strict=True))
        self._bounds = b1, b2, b3
        self._p = b1, 0.0, 0.0, b2, 0.0, b3
        self.noise = NOISE_START
        self._surprises, self._surprise = 0, 0.0

    def _find_level(self, y: Three, time_ms: float) -> None:
        """Scale the start by the median of the ratios so far, where one vote is for the start itself."""
        s1, s2, s3 = self._start
        if s1 + s2 + s3 < self._floor_ms:  # a start from nothing has no level to be wrong by a factor
            s1 = self._floor_ms
        believed_ms = s1 * y[0] + s2 * y[1] + s3 * y[2]
        self._first.append(log(max(time_ms, self._floor_ms) / max(believed_ms, self._floor_ms)))
        self.runs += 1
        factor = exp(median([0.0, *self._first]))
        self.terms = min(s1 * factor, TERM_MAX), min(s2 * factor, TERM_MAX), min(s3 * factor, TERM_MAX)
        self._open()

    def _learn_noise(self, size: float, told: float) -> None:
        rate = max(NOISE_RATE_MIN, 1.0 / (self.runs + 2)) * told
        noise = self.noise + rate * (1.25 * min(size, CLIP * self.noise) - self.noise)  # 1.25 mean errors: one sigma
        self.noise = min(max(noise, NOISE_MIN), NOISE_MAX)

    def _is_surprised(self, is_far: bool, error: float, ratio: float) -> bool:  # noqa: FBT001 - private, and called once
        """Count those in a row that are far off to one side; one that is not takes one off."""
        count = abs(self._surprises)
        if not is_far:
            if count:
                self._surprise *= (count - 1) / count
                self._surprises = (count - 1) if self._surprises > 0 else 1 - count
            return False
        side = 1 if error > 0 else -1
        if side * self._surprises < 0:
            self._surprises, self._surprise, count = 0, 0.0, 0
        self._surprises += side
        self._surprise += log(ratio)
        if count + 1 < SURPRISES:
            return False
        factor = exp(self._surprise / SURPRISES)
        t1, t2, t3 = (min(t * factor, TERM_MAX) for t in self.terms)
        self.terms = t1, t2, t3
        self._open()
        return True

    def _bound(self) -> None:
        """Hold each variance between nothing and that of the start; a correlation stays what it is."""
        p11, p12, p13, p22, p23, p33 = self._p
        b1, b2, b3 = self._bounds
        if p11 > b1:
            shrink = sqrt(b1 / p11)
            p11, p12, p13 = b1, p12 * shrink, p13 * shrink
        if p22 > b2:
            shrink = sqrt(b2 / p22)
            p22, p12, p23 = b2, p12 * shrink, p23 * shrink
        if p33 > b3:
            shrink = sqrt(b3 / p33)
            p33, p13, p23 = b3, p13 * shrink, p23 * shrink
        is_sound = p11 > _SMALL * b1 and p22 > _SMALL * b2 and p33 > _SMALL * b3  # false for what is no number, too
        self._p = (p11, p12, p13, p22, p23, p33) if is_sound else (LOOSENED * b1, 0.0, 0.0, LOOSENED * b2, 0.0, LOOSENED * b3)

    def _keep_sane(self) -> None:
        """Take the best fit whose terms are not negative."""
        t1, t2, t3 = self.terms
        p11, p12, p13, p22, p23, p33 = self._p
        if t1 < 0.0:
            t2, t3, t1 = t2 - t1 * p12 / p11, t3 - t1 * p13 / p11, 0.0
        if t3 < 0.0:
            t1, t2, t3 = t1 - t3 * p13 / p33, t2 - t3 * p23 / p33, 0.0
        if t2 < 0.0:
            t1, t3, t2 = t1 - t2 * p12 / p22, t3 - t2 * p23 / p22, 0.0
        self.terms = min(max(t1, 0.0), TERM_MAX), min(max(t2, 0.0), TERM_MAX), min(max(t3, 0.0), TERM_MAX)
