"""The requirements of OWASP AISVS that the evidence answers, quoted, with their source and licence.

The numbers 11.3.2, 11.3.3 and 12.3.1 to 12.3.3 are those of the working draft of AISVS 1.0. In June
2026 its chapter on privacy was removed and chapter 11 renumbered. In the published version 1.0, the
first two requirements are 11.2.4 and 11.2.5, the other three are gone, and the five old numbers
belong to requirements on model extraction and drift, which a training run cannot answer.
"""

from __future__ import annotations

from dataclasses import dataclass

_SOURCE = "https://github.com/OWASP/AISVS/blob"
_PUBLISHED = f"{_SOURCE}/94fbad5acee4e4716bff263a4c455dfd780e53a7/1.0/en"
_DRAFT = f"{_SOURCE}/84bbbf702a573f5a6f66a5532a1a39014399de25/1.0/en"


@dataclass(frozen=True)
class Requirement:
    """One requirement, with its wording in the working draft and in the published standard.

    Attributes:
        title: What is asked, in a few words.
        draft: Number in the working draft of June 2026.
        draft_text: Wording there.
        draft_source: Address of the draft's chapter.
        number: Number in the published AISVS 1.0; None where the requirement was dropped.
        text: Wording there; None where it was dropped.
        source: Address of the published chapter; None where it was dropped.
        level: Level of verification, from 1 to 3.
    """

    title: str
    draft: str
    draft_text: str
    draft_source: str
    number: str | None
    text: str | None
    source: str | None
    level: int


_ROBUSTNESS, _PRIVACY = "0x10-C11-Adversarial-Robustness.md", "0x10-C12-Privacy.md"

REQUIREMENTS = (
    Requirement(
        title="Trained with differential privacy, and the ε is written down",
        draft="11.3.2",
        draft_text="Verify that training on sensitive datasets employs differentially-private"
        " optimization (e.g., DP-SGD) with a documented privacy budget (epsilon).",
        draft_source=f"{_DRAFT}/{_ROBUSTNESS}",
        number="11.2.4",
        text="Verify that training on sensitive datasets employs differentially-private"
        " optimization.",
        source=f"{_PUBLISHED}/{_ROBUSTNESS}",
        level=2,
    ),
    Requirement(
        title="Tested by attacks that ask who was in the data",
        draft="11.3.3",
        draft_text="Verify that membership-inference attack simulations (e.g., shadow-model,"
        " likelihood-ratio, or label-only attacks) demonstrate that attack accuracy does not"
        " meaningfully exceed random guessing on held-out data.",
        draft_source=f"{_DRAFT}/{_ROBUSTNESS}",
        number="11.2.5",
        text="Verify that membership-inference attack simulations demonstrate that attack accuracy"
        " does not exceed random guessing on evaluated data.",
        source=f"{_PUBLISHED}/{_ROBUSTNESS}",
        level=3,
    ),
    Requirement(
        title="ε and δ recorded round by round, with an alert",
        draft="12.3.1",
        draft_text="Verify that differential privacy budget consumption (both ε and δ values) is"
        " tracked and recorded per training round, and that cumulative consumption triggers an"
        " alert when ε exceeds defined policy thresholds.",
        draft_source=f"{_DRAFT}/{_PRIVACY}",
        number=None,
        text=None,
        source=None,
        level=2,
    ),
    Requirement(
        title="An audit that measures ε from below",
        draft="12.3.2",
        draft_text="Verify that black-box privacy audits empirically estimate ε̂ as a lower bound at"
        " a stated confidence level (e.g., Clopper-Pearson or f-DP confidence intervals), and that"
        " the estimate is consistent with the declared budget within documented tolerance.",
        draft_source=f"{_DRAFT}/{_PRIVACY}",
        number=None,
        text=None,
        source=None,
        level=2,
    ),
    Requirement(
        title="Proofs that cover every fine-tuning on the same data",
        draft="12.3.3",
        draft_text="Verify that formal privacy proofs cover all post-training fine-tunes and"
        " embedding generation steps that consume the same source data.",
        draft_source=f"{_DRAFT}/{_PRIVACY}",
        number=None,
        text=None,
        source=None,
        level=3,
    ),
)

LICENCE = (
    "Requirement texts: OWASP Artificial Intelligence Security Verification Standard (AISVS),"
    " copyright 2025-2026 The AISVS Project, licensed under CC BY-SA 4.0"
    " (https://creativecommons.org/licenses/by-sa/4.0/), quoted unchanged."
)

NUMBERS = (
    "The five questions below were numbered 11.3.2, 11.3.3 and 12.3.1 to 12.3.3 in the working"
    " draft of AISVS 1.0. In the published AISVS 1.0 the first two became 11.2.4 and 11.2.5, and"
    " the other three were dropped together with the draft's chapter on privacy. The published"
    " standard now uses the old numbers for other topics (access to raw model outputs,"
    " watermarks, drift and hallucinations of a deployed service); a training run says nothing"
    " about those."
)
