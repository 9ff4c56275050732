/* Engines as tiles. Each engine has an outline ("hull") too, always as large as its group: when engines merge, their
   outlines grow into one and all but the leader's fade; when they part, the outlines shrink back from it. */

const GAP = 14, HEAD = 62, FOOT = 56, INNER = 6, NARROW_FOOT = 76, NARROW = 250, LEAST_CELL = 150;
const CELL_HEIGHT = 150, ROOMY_HEIGHT = 232;

const one = (id) => document.getElementById(id);

function make(tag, name, ...inside) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.append(...inside);
  return made;
}

function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/* Numbers as people read them: three digits that matter. */
function short(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10000) return `${(value / 1000).toFixed(value < 100000 ? 1 : 0)}k`;
  if (value >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return value.toFixed(value >= 10 ? 1 : 2);
}

const lasting = (ms) => (ms === null || ms === undefined ? "–" : ms < 999.5 ? `${short(ms)} ms` : `${short(ms / 1000)} s`);

const percent = (share) => (share === null || share === undefined ? "–" : `${Math.round(share * 100)} %`);

/* A number of bytes in the largest unit of which there is one. */
function room(bytes) {
  const power = Math.min(4, Math.max(0, Math.floor(Math.log2(bytes || 1) / 10)));
  return `${short(bytes / 1024 ** power)}\u00a0${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

const clock = (at_s) => new Date(at_s * 1000).toLocaleTimeString([], { hour12: false });

const members = (engines) => (engines.length > 2 ? `${engines[0]}–${engines.at(-1)}` : engines.join(", "));

const tiles = { hulls: [], engines: [], last: null };

function build(count) {
  const box = one("tiles");
  box.replaceChildren();
  tiles.hulls = [];
  tiles.engines = [];
  for (let e = 0; e < count; e++) {
    const hull = make("article", "hull");
    const footer = make("footer");
    for (const name of ["output", "TPOT", "TTFT"]) footer.append(make("span", "", name, make("b", "", "–")));
    hull.append(
      make("header", "", make("span", "badge"), make("span", "who"), make("span", "load", make("b"), make("span"))),
      make("div", "slots"), footer);
    tiles.hulls.push(hull);
  }
  for (let e = 0; e < count; e++) {
    const engine = make("div", "engine", make("div", "weights"), make("div", "loan"), make("div", "level"),
      make("div", "name", make("strong", "", String(e)), make("p", "kv", "KV ", make("b"), make("span"), make("small", "lent"))), make("div", "olds"), make("p", "why"));
    tiles.engines.push(engine);
  }
  box.append(...tiles.hulls, ...tiles.engines);
}

/* As many columns as fit, a power of two, so that an aligned group is always a rectangle. */
function columnsFor(count, width) {
  let columns = count;
  while (columns > 1 && width / columns < LEAST_CELL) columns /= 2;
  return width < 900 && count > 4 ? Math.min(columns, 4) : columns;
}

function place(element, left, top, width, height) {
  Object.assign(element.style, { left: `${left}px`, top: `${top}px`, width: `${width}px`, height: `${height}px` });
}

function arrange(state) {
  const box = one("tiles"), count = state.engines.length;
  const columns = columnsFor(count, box.clientWidth);
  const wide = (box.clientWidth + GAP) / columns, roomy = columns === count && box.clientWidth >= 640, pad = box.clientWidth < 640 ? 12 : 16;
  const high = HEAD + (roomy ? ROOMY_HEIGHT : CELL_HEIGHT) + FOOT + GAP;
  box.style.height = `${(count / columns) * high - GAP}px`;
  for (const group of [...state.groups, ...state.lost.map((each) => ({ engines: [each.engine] }))]) {
    const across = Math.min(group.engines.length, columns), down = group.engines.length / across;
    const first = group.engines[0];
    const left = (first % columns) * wide, top = Math.floor(first / columns) * high;
    const width = across * wide - GAP, height = down * high - GAP, narrow = width < NARROW;
    const cellWidth = (width - 4 - 2 * pad - (across - 1) * INNER) / across;
    const cellHeight = (height - 4 - HEAD - (narrow ? NARROW_FOOT : FOOT) - (down - 1) * INNER) / down;
    group.engines.forEach((e, i) => {
      place(tiles.hulls[e], left, top, width, height);
      tiles.hulls[e].classList.toggle("narrow", narrow);
      const x = left + 2 + pad + (i % across) * (cellWidth + INNER);
      const y = top + 2 + HEAD + Math.floor(i / across) * (cellHeight + INNER);
      place(tiles.engines[e], x, y, cellWidth, cellHeight);
    });
  }
}

function drawGroup(hull, group, maxNumSeqs) {
  hull.dataset.degree = group.degree;
  write(hull.querySelector(".badge"), `TP ${group.degree}`);
  write(hull.querySelector(".who"), `${group.engines.length > 1 ? "engines" : "engine"} ${members(group.engines)}`);
  const [running, rest] = hull.querySelector(".load").children;
  write(running, String(group.requests));
  write(rest, ` / ${maxNumSeqs}`);
  hull.querySelector(".load").title = `${group.requests} requests of at most ${maxNumSeqs} at a time`;
  const bar = hull.querySelector(".slots");
  const marks = Math.min(maxNumSeqs, Math.max(8, Math.floor((hull.clientWidth || 300) / 9)));
  while (bar.children.length > marks) bar.lastChild.remove();
  while (bar.children.length < marks) bar.append(make("i"));
  const on = Math.ceil((group.requests / maxNumSeqs) * marks);
  Array.from(bar.children).forEach((mark, i) => mark.classList.toggle("on", i < on));
  const { tokens_per_s, tpot_mean_ms, ttft_mean_ms } = group.figures;
  const texts = [`${short(tokens_per_s)} tok/s`, lasting(tpot_mean_ms), lasting(ttft_mean_ms)];
  hull.querySelectorAll("footer b").forEach((cell, i) => write(cell, texts[i]));
}

/* The tile is the engine's memory: weights above, KV below, filled as far as it is in use. What weights have lent lies
   between. */
function drawMemory(tile, usage, memory) {
  const { weight_bytes: weights, kv_bytes: own, lent_bytes: lent } = memory ?? { weight_bytes: 0, kv_bytes: 1, lent_bytes: 0 };
  const share = (bytes) => `${(100 * bytes) / (weights + own)}%`, kv = own + lent;
  tile.querySelector(".weights").style.height = share(weights - lent);
  Object.assign(tile.querySelector(".loan").style, { top: share(weights - lent), height: share(lent), opacity: lent ? 1 : 0 });
  tile.querySelector(".level").style.height = share(kv * Math.min(1, usage ?? 0));
  tile.querySelector(".level").style.opacity = usage ? 1 : 0;
  const texts = [percent(usage), memory ? ` of ${room(kv)}` : "", lent ? `${room(lent)} of it lent by weights` : ""];
  tile.querySelectorAll(".kv > *").forEach((element, i) => write(element, texts[i]));
}

function drawEngine(tile, engine, group, others) {
  tile.dataset.degree = group.degree;
  tile.dataset.group = group.engines.join(",");
  drawMemory(tile, engine.kv_usage, engine.memory);
  const olds = tile.querySelector(".olds");
  const mine = others.filter((each) => each.engines.includes(engine.engine));
  while (olds.children.length > mine.length) olds.lastChild.remove();
  while (olds.children.length < mine.length) olds.append(make("span"));
  mine.forEach((each, i) => {
    olds.children[i].dataset.degree = each.degree;
    write(olds.children[i], `${each.requests} at TP ${each.degree}${each.state === "paused" ? ", paused" : ""}`);
    olds.children[i].title = `${each.requests} requests go on at degree ${each.degree}, ${each.state}`;
  });
}

/* An engine that is not there has a place of its own, which says since when and why. */
function drawLost(hull, tile, lost, state) {
  const text = (name, content) => write(hull.querySelector(name), content);
  delete hull.dataset.degree;
  delete tile.dataset.degree;
  tile.dataset.group = "";
  text(".badge", "lost");
  text(".who", `engine ${lost.engine}`);
  hull.querySelector(".load").title = "";
  write(hull.querySelector(".load b"), "");
  write(hull.querySelector(".load span"), lasting(1000 * Math.max(0, state.time - lost.since)));
  const often = lost.losses > 1 ? `, ${lost.losses} losses so far` : "";
  const again = lost.start_problem ? `; last start: ${lost.start_problem}` : "";
  hull.title = `since ${clock(lost.since)}: ${lost.why}${often}${again}`;
  write(tile.querySelector(".why"), hull.title);
}

function drawFormation(state) {
  tiles.last = state;
  if (tiles.engines.length !== state.engines.length) build(state.engines.length);
  arrange(state);
  tiles.hulls.forEach((hull, e) => {
    const lost = state.lost.find((each) => each.engine === e);
    for (const element of [hull, tiles.engines[e]]) element.classList.toggle("gone", Boolean(lost));
    if (!lost) {
      hull.title = "";
      return write(tiles.engines[e].querySelector(".why"), "");
    }
    hull.classList.remove("merged");
    hull.setAttribute("aria-hidden", "false");
    drawLost(hull, tiles.engines[e], lost, state);
  });
  for (const group of state.groups) {
    group.engines.forEach((e, i) => {
      tiles.hulls[e].classList.toggle("merged", i > 0);
      tiles.hulls[e].setAttribute("aria-hidden", String(i > 0));
      drawGroup(tiles.hulls[e], group, state.max_num_seqs);
      drawEngine(tiles.engines[e], state.engines[e], group, state.others);
    });
  }
}

addEventListener("resize", () => tiles.last && arrange(tiles.last));
