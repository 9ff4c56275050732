/* Asks the server for its state, a few times a second while somebody can see it, and has it drawn. */

const POLL_MS = 300, RETRY_MS = 1000, PATIENCE_MS = 5000, KEY_NAME = "flying-serving-key";
const needsKey = document.querySelector("meta[name=flying-key]").content === "required";
let key = sessionStorage.getItem(KEY_NAME) ?? "", timer = 0, asking = false;

function link(name, text) {
  one("link").className = `link ${name}`;
  write(one("link"), text);
}

function lostOnes(lost) {
  const engines = lost.map((each) => each.engine);
  return engines.length > 1 ? `engines ${engines.join(", ")} are` : `engine ${engines[0]} is`;
}

function draw(state) {
  write(one("model"), state.model);
  one("model").title = state.model;
  write(one("policy"), state.policy);
  write(one("layout"), state.groups.map((group) => group.degree).join("+"));
  one("view").hidden = false;
  one("view").classList.remove("stale");
  drawFigures(state);
  drawFormation(state);
  drawSplits(state);
  drawSwitches(state);
  if (state.degraded) link("degraded", `degraded: ${lostOnes(state.lost)} lost${state.changing ? ", switching" : ""}`);
  else link("live", state.changing ? "switching" : "live");
}

function askForKey(why) {
  one("view").hidden = true;
  one("ask").hidden = false;
  one("ask").classList.toggle("wrong", Boolean(why));
  if (why) write(one("ask-why"), why);
  link("", "API key needed");
  one("key").focus();
}

function refuseKey() {
  const why = key ? "The server refused this API key." : "This server wants its API key.";
  key = "";
  sessionStorage.removeItem(KEY_NAME);
  askForKey(why);
}

async function look() {
  clearTimeout(timer);
  if (document.hidden || asking) return;
  asking = true;
  let next = POLL_MS;
  try {
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const answer = await fetch("view", { headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (answer.status === 401) return refuseKey();
    if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
    draw(await answer.json());
  } catch (error) {
    one("view").classList.add("stale");
    link("lost", error instanceof TypeError ? "no answer, trying again" : error.message);
    next = RETRY_MS;
  } finally {
    asking = false;
  }
  timer = setTimeout(look, next);
}

one("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const typed = one("key").value.trim();
  one("key").value = "";
  if (!/^[\x21-\x7e]+$/.test(typed)) return askForKey("An API key has visible ASCII characters and no spaces.");
  key = typed;
  sessionStorage.setItem(KEY_NAME, key);
  one("ask").hidden = true;
  look();
});

document.addEventListener("visibilitychange", () => document.hidden || !one("ask").hidden || look());
write(one("span"), `last ${SPAN_S / 60} minutes`);
one("axis").append(...[3, 2, 1].map((minutes) => make("span", "", `−${minutes} min`)), make("span", "", "now"));
if (needsKey && !key) askForKey("");
else look();
