"""Wrong use of the admin commands, and what they answer."""

from flying_serving.config import MODES
from tests.deep.server.errors.case import Case

COMMAND_CASES = (
    NO_SERVER := Case("`status` without a server", "no server answers", 1),
    NO_URL := Case(
        "`status --url foo`",
        "--url='foo': Request URL is missing an 'http://' or 'https://' protocol.",
        2,
    ),
    NO_NUMBER := Case(
        "`layout 0,x`", "GROUP='0,x': engine numbers with commas between are expected, like 0,1", 2
    ),
    NOT_OURS := Case(
        "`status` of a server that is not ours", "this is not a Flying Serving server (404)", 1
    ),
    COMMAND_KEY := Case(
        "`status` without its API key",
        "the API key is missing or wrong; set --api-key or VLLM_API_KEY",
        2,
    ),
    UNALIGNED := Case(
        "`layout 1,2 0 3`",
        "groups[0]=[1, 2]: groups are aligned and contiguous, like [0, 1] (400)",
        2,
    ),
    INCOMPLETE := Case(
        "`layout 0 1`", "groups=[[0], [1]]: engine 2 is in no group; name every engine (400)", 2
    ),
    GENTLE := Case(
        "`layout 0,1 2,3 --mode gentle`", f"mode='gentle': must be one of {list(MODES)} (400)", 2
    ),
    NO_STEPS := Case("`layout 0,1 2,3 --weave-steps 0`", "Invalid value for '--weave-steps'", 2),
    BOTH_WAYS := Case(
        "`drain --cancel --wait-s 1`", "--cancel or --wait-s is expected, not both", 2
    ),
    SICK := Case("`doctor` finds something bad", "bad", 1),
)
