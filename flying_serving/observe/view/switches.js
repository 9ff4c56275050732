/* What the layouts were: a band with a row per engine, and the last switches with their reasons and costs. */

const SPAN_S = 180, SHOWN = 6;

/* A layout as a row of small blocks, wide as their groups are. */
function glyph(groups, devices) {
  const engine = groups.flat().length > 4 ? 7 : 12;
  const made = make("span", "glyph");
  for (const group of groups) {
    const block = make("i");
    block.dataset.degree = group.length * devices;
    block.style.width = `${group.length * engine + (group.length - 1) * 3}px`;
    made.append(block);
  }
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", groups.map((group) => group.length * devices).join("+"));
  return made;
}

/* [begin, end, groups] of each layout since `from_s`, as far back as the server told of switches, losses and returns. */
function epochs(state, from_s) {
  const done = [...state.switches, ...state.regroupings].filter((each) => each.time > 0).sort((a, b) => a.time - b.time);
  const found = [];
  let end = state.time, groups = state.layout;
  for (const each of done.toReversed()) {
    found.push([Math.max(each.time, from_s), end, groups]);
    if (each.time <= from_s) return found;
    end = each.time;
    groups = each.from;
  }
  if (state.switches.length === state.switch_count) found.push([Math.max(state.started, from_s), end, groups]);
  return found;
}

function drawBand(state) {
  const from_s = state.time - SPAN_S, band = one("band");
  while (band.children.length > state.engines.length) band.lastChild.remove();
  while (band.children.length < state.engines.length) band.append(make("div", "row"));
  const found = epochs(state, from_s).filter(([begin_s, end_s]) => end_s - begin_s > SPAN_S / 400);
  state.engines.forEach((_, e) => {
    const row = band.children[e];
    row.dataset.engine = e;
    while (row.children.length > found.length) row.lastChild.remove();
    while (row.children.length < found.length) row.append(make("i"));
    found.forEach(([begin_s, end_s, groups], i) => {
      const mark = row.children[i], group = groups.find((each) => each.includes(e));
      mark.dataset.degree = group ? group.length * state.devices_per_engine : "lost";
      mark.dataset.place = !group || group.length === 1 ? "" : e === group[0] ? "first" : e === group.at(-1) ? "last" : "inner";
      mark.style.left = `${((begin_s - from_s) / SPAN_S) * 100}%`;
      mark.style.width = `${((end_s - begin_s) / SPAN_S) * 100}%`;
    });
  });
}

function ago(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s ago`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min ago`;
  return `${Math.round(seconds / 3600)} h ago`;
}

function costs(each) {
  const list = make("dl");
  const add = (name, text) => list.append(make("div", "", make("dt", "", name), make("dd", "", text)));
  if (each.cutover_ms !== null) add("cutover", lasting(each.cutover_ms));
  if (each.waited_for_idle_ms >= 1) add("waited", lasting(each.waited_for_idle_ms));
  add("drain", each.open ? "under way" : lasting(each.drain_ms));
  if (each.worst_token_gap_ms > 0) add("longest gap", lasting(each.worst_token_gap_ms));
  const { predicted_gain_request_s: gain, predicted_cost_request_s: cost } = each;
  if (cost !== null) add("gain", gain === null ? "∞" : `${short(gain)} request-s`);
  if (cost !== null) add("cost", `${short(cost)} request-s`);
  return list;
}

function entry(each, state) {
  const item = make("li");
  item.append(
    make("div", "move", glyph(each.from, state.devices_per_engine), make("span", "arrow", "→"),
      glyph(each.to, state.devices_per_engine), make("span", "tag", each.mode), make("span", "when")),
    make("p", each.problem ? "bad" : "", each.problem ? `failed: ${each.problem}` : each.reason),
    costs(each));
  return item;
}

function drawSwitches(state) {
  drawBand(state);
  const list = one("switches"), shown = state.switches.slice(-SHOWN).reverse();
  write(one("count"), state.switch_count ? `${state.switch_count} since the start` : "");
  const print = JSON.stringify(shown);
  if (list.dataset.print !== print) {
    list.dataset.print = print;
    list.replaceChildren(...shown.map((each) => entry(each, state)));
    if (!shown.length) list.append(make("li", "empty", "No switch yet."));
  }
  list.querySelectorAll(".when").forEach((cell, i) => {
    write(cell, shown[i].time > 0 ? ago(state.time - shown[i].time) : "waits");
  });
}
