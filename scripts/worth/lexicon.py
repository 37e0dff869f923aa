"""A judge of sentiment that nothing was trained on: a list of plain English words of opinion.

The list was written by hand, from general knowledge of English and not from any model's texts or
any labels. A text scores the good words less the bad ones; a word is turned round by "not", "no",
"never", "without" or "-n't" within the two words before it. Short texts often score 0. No policy is
trained with it: it is there to see whether a rise of the reward is a change of the text.
"""

from __future__ import annotations

import re
from typing import Any

_GOOD = """
admirable adore adored amazing amusing appealing awesome beautiful beautifully beauty best better
brilliant brilliantly captivating charm charming clever colourful colorful comfort compelling
creative creativity delight delighted delightful delicious dazzling elegant engaging enjoy
enjoyable enjoyed enjoying entertaining excellent excited excitement exciting exceptional
exquisite extraordinary fabulous fantastic fascinating favorite favourite fine flawless fresh fun
funny generous genius gem gentle glad glorious good gorgeous grace graceful great greatest happy
harmony heartwarming hilarious honest hope hopeful imaginative impressed impressive incredible
incredibly innovative insightful inspire inspired inspiring intelligent interesting intriguing joy
joyful kind laugh laughs liked likeable love loved lovely loving loves magic magical magnificent
marvelous marvellous masterful masterpiece memorable moving nice original outstanding passion
passionate perfect perfectly playful pleasant pleased pleasure polished powerful praise precious
profound proud recommend recommended refreshing remarkable rewarding rich satisfying sincere smart
smile solid special spectacular splendid striking strong stunning stylish sublime success
successful superb sweet talented tender terrific thoughtful thrilled thrilling timeless touching
triumph true uplifting vibrant vivid warm warmth wit witty wonder wonderful wonderfully worth
worthy
"""
_BAD = """
abysmal absurd amateurish angry annoyed annoying appalling atrocious awful awfully awkward bad
badly bland bleak boring bored boredom broken cheap cheesy clichéd cliché clueless clumsy confused
confusing contrived crap crappy crude cruel dead death depressing disappointed disappointing
disappointment disaster disgusting dismal drab dreadful dreary dull dumb embarrassing emptiness
empty excruciating fail failed fails failure fake fatal flat flaw flawed flaws forced forgettable
frustrating frustrated garbage grim gross hate hated hateful hideous hollow hopeless horrible
horribly horrid idiotic ill implausible inane incoherent inept inferior insipid insult insulting
irritating junk lack lacked lacking lacks lame laughable lazy lifeless lost ludicrous mediocre
mess messy mindless miserable miserably missing mistake monotonous murky nasty nonsense
nonsensical numb obnoxious offensive overlong overrated pain painful painfully pathetic pointless
poor poorly predictable pretentious problem problems regret repetitive repulsive ridiculous rotten
rubbish ruin ruined ruins sad sadly shallow shame shoddy sick silly slow sloppy stale stupid suck
sucked sucks suffer suffers tasteless tedious terrible terribly tired tiresome trash trashy trite
ugly unbearable uninspired uninteresting unconvincing unfortunate unfortunately unfunny unlikeable
unpleasant unwatchable useless vapid vile wasted waste wasting weak weird worse worst worthless
wreck wretched wrong
"""
GOOD, BAD = frozenset(_GOOD.split()), frozenset(_BAD.split())
TURNS = frozenset({"not", "no", "never", "without", "nothing", "hardly", "barely"})
WORD = re.compile(r"[a-zé]+(?:'[a-z]+)?")


def sentiment(text: str) -> float:
    """Return the number of good words in a text less the number of bad ones."""
    words = WORD.findall(text.lower().replace("\u2019", "'"))
    total = 0
    for place, word in enumerate(words):
        value = int(word in GOOD) - int(word in BAD)
        before = words[max(0, place - 2) : place]
        turned = any(w in TURNS or w.endswith("n't") for w in before)
        total += -value if turned else value
    return float(total)


def judge(
    prompts: list[str], completions: list[str], wants: list[float], **columns: Any
) -> list[float]:
    """Score completions as a reward does, with TRL's signature, by what each user wants."""
    return [wish * sentiment(text) for text, wish in zip(completions, wants, strict=True)]
