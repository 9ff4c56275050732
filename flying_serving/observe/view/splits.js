/* Requests that two groups share: each is one bar from the engines that begin it to those that go on. */

function splitRow() {
  return make("div", "split", make("u"), make("b", "first"), make("span", "second"));
}

/* In a grid with a column for each engine: from the first of these engines to the last. */
function across(element, engines) {
  element.style.gridColumn = `${Math.min(...engines) + 1} / ${Math.max(...engines) + 2}`;
}

function drawSplits(state) {
  const { splits } = state, rows = one("split-rows");
  one("splits").hidden = splits.begun === 0;
  write(one("split-count"), `${splits.now} now, ${splits.begun} so far`);
  while (rows.children.length > splits.shown.length) rows.lastChild.remove();
  while (rows.children.length < splits.shown.length) rows.append(splitRow());
  splits.shown.forEach(({ first, second, at, rest }, i) => {
    const row = rows.children[i], [between, begins, goesOn] = row.children;
    row.style.gridTemplateColumns = `repeat(${state.engines.length}, minmax(0, 1fr))`;
    row.title = `engines ${members(first)}: the first ${at} tokens; engines ${members(second)}: the other ${rest}`;
    across(between, [...first, ...second]);
    for (const [part, engines, text] of [[begins, first, `${at} tokens`], [goesOn, second, `then ${rest}`]]) {
      part.dataset.degree = engines.length * state.devices_per_engine;
      part.dataset.engines = engines.join(",");
      across(part, engines);
      write(part, `${members(engines)} · ${text}`);
    }
  });
}
