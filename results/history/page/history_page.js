// The panels of a history: drawn when they come into view, filtered and sorted, and opened large. The address keeps what is
// shown, as #machine=2&text=...&sort=noise, with series=ID for the panel that is pointed out and large=ID for that opened.

const all = (selector, root = document) => Array.from(root.querySelectorAll(selector));
const block = document.getElementById('data');
const data = JSON.parse(block.textContent);
const commitUrl = block.dataset.commitUrl;
const form = document.querySelector('.controls form');
const output = form.querySelector('output');
const dialog = document.getElementById('large');
const SMALL = {width: 340, height: 118, left: 44, right: 6, top: 16, bottom: 15, large: false};
const SMALL_STRIP = {...SMALL, left: 74};

// --- What the data says.

const machines = data.machines.map(([signature, builds, runs]) => ({
  signature,
  builds,
  runs: runs.map(([name, start, commit, dirty, date, subject, build]) => ({name, start, commit, dirty, date, subject, build})),
}));
const secondsOf = (run) => (run.date === null ? run.start : run.date);
const dateOf = (run) => new Date(secondsOf(run) * 1000).toISOString().slice(0, 10);
const makeChange = ([run, begin, at, end, before, after, kind, size, interval, remark, builds]) =>
    ({run, begin, at, end, before: Number(before), after: Number(after), kind, size, interval, remark, builds});
const cases = data.cases.map(([id, machine, order, name, problem, family, device, series], rank) => ({
  id, machine, order, rank,
  name: data.strings[name], problem: data.strings[problem], family: data.strings[family], device: data.strings[device],
  raw: series,
}));
const casesById = new Map(cases.map((one) => [one.id, one]));
const changesOf = (raw) => raw[6];
const metricOf = (raw) => data.metrics[raw[0]][0];
const formatted = (series, value) => formatValue(series.metric, value, data.statuses);

// Series by id, decoded when they are first drawn.
const decoded = new Map();
const idOf = (one, raw) => `${one.id}.${metricOf(raw)}`;
const seriesOf = (one, raw) => {
  const id = idOf(one, raw);
  if (!decoded.has(id)) {
    const [metric, text, noise, level, bound, reason, changes] = raw;
    decoded.set(id, {
      id, one, noise, reason,
      metric: data.metrics[metric][0], title: data.metrics[metric][1],
      level: level === null ? NaN : Number(level), bound: bound === null ? NaN : Number(bound),
      changes: changes.map(makeChange),
      ...decodeSeries(text),
    });
  }
  return decoded.get(id);
};
const findSeries = (id) => {
  const one = casesById.get(id.slice(0, id.indexOf('.')));
  const raw = one && one.raw.find((candidate) => idOf(one, candidate) === id);
  return raw ? seriesOf(one, raw) : null;
};
const isConstant = ({items, changes}) =>
    changes.length === 0 && items.every(({low, high, odd}) => Object.is(low, high) && Object.is(low, items[0].low) && odd === items[0].odd);
const levelAt = (series, place) => {
  const change = series.changes.find(({begin, end}) => begin <= place && place < end);
  return change ? (place < change.at ? change.before : change.after) : series.level;
};
const runOf = (series, place) => machines[series.one.machine].runs[series.runs[place]];

// --- Words.

const commitNode = (run) => {
  if (!run.commit) return make('span', {}, `run ${run.name}`);
  const name = run.commit.slice(0, 8) + (run.dirty ? '+' : '');
  const title = run.subject + (run.dirty ? ' (with changes that are not committed)' : '') || undefined;
  if (!commitUrl) return make('span', {class: 'commit', title}, name);
  const href = commitUrl.replaceAll('%s', () => encodeURIComponent(run.commit));
  return make('a', {class: 'commit', href, title, rel: 'noreferrer'}, name);
};
// Tells an item in two lines: its value, and the run that it is of.
const tellItem = (series, item) => {
  const total = machines[series.one.machine].runs.length;
  const first = series.runs[item.first], place = item.first + item.count - 1, last = series.runs[place];
  const level = levelAt(series, item.first), ratio = item.value / level;
  const hasRatio = series.metric !== 'status' && Number.isFinite(ratio) && level > 0;
  const one = item.count === 1;
  const value = make('span', {class: 'told'}, make('b', {}, formatted(series, item.value)));
  if (!one) value.append(` median of ${item.count} runs, ${formatted(series, item.low)} to ${formatted(series, item.high)}`);
  if (!one && item.odd > 0) value.append(`, ${item.odd} not finite`);
  if (hasRatio) value.append(make('span', {class: 'faint'}, ` · ${ratio.toFixed(ratio < 9.995 ? 3 : 0)} of its level`));
  const run = runOf(series, place), from = runOf(series, item.first);
  const when = make('span', {class: 'told'}, one ? `run ${last + 1} of ${total} · ${dateOf(run)} · ` :
      `runs ${first + 1}–${last + 1} of ${total} · ${dateOf(from)} to ${dateOf(run)} · `);
  if (!one) when.append(commitNode(from), ' … ');
  when.append(commitNode(run), one ? ` ${run.subject}` : '');
  return [value, when];
};

// The properties of the build of an item's latest run.
const buildOf = (series, {first, count}) => {
  const {build} = runOf(series, first + count - 1);
  return machines[series.one.machine].builds[build].join(' · ');
};

// --- Panels, small and large.

// The part of a machine's runs that is shown.
const viewOf = (series) => {
  const to = machines[series.one.machine].runs.length;
  return {from: state.last ? Math.max(0, to - Number(state.last)) : 0, to};
};

// Draws `series` into `place`, and tells in `readout` what is pointed at, or the latest run.
const drawInto = (place, readout, series, size, openLarge) => {
  const context = {statuses: data.statuses, dateOf: (run) => dateOf(machines[series.one.machine].runs[run])};
  const {root, points, point} = plotSeries(series, viewOf(series), size, context);
  let current = points.length - 1;
  const tell = (i, marked = true) => {
    current = Math.min(Math.max(i, 0), points.length - 1);
    if (current < 0) {
      readout.replaceChildren('no value in these runs');
      return;
    }
    const [value, when] = tellItem(series, points[current].item);
    readout.replaceChildren(value, when);
    if (size.large) readout.append(make('span', {class: 'told'}, buildOf(series, points[current].item)));
    point(marked ? current : -1);
    root.setAttribute('aria-valuenow', current + 1);
    root.setAttribute('aria-valuetext', `${value.textContent}, ${when.textContent}`);
  };
  root.setAttribute('role', 'slider');
  root.setAttribute('tabindex', '0');
  root.setAttribute('aria-label', `${series.title} of ${series.one.name}, ${series.one.problem}`);
  root.setAttribute('aria-valuemin', points.length > 0 ? '1' : '0');
  root.setAttribute('aria-valuemax', points.length);
  root.setAttribute('aria-valuenow', points.length);
  const nextChange = (step) => {
    const starts = series.changes.map(({at}) => points.findIndex(({item}) => item.first >= at)).filter((i) => i >= 0);
    const found = step > 0 ? starts.find((i) => i > current) : starts.reverse().find((i) => i < current);
    return found === undefined ? current : found;
  };
  const keys = {
    ArrowRight: () => current + 1, ArrowUp: () => current + 1,
    ArrowLeft: () => current - 1, ArrowDown: () => current - 1,
    Home: () => 0, End: () => points.length - 1, PageUp: () => nextChange(-1), PageDown: () => nextChange(1),
  };
  root.addEventListener('keydown', (event) => {
    if (event.key === 'Enter' && openLarge) openLarge();
    else if (keys[event.key]) tell(keys[event.key]());
    else return;
    event.preventDefault();
  });
  root.addEventListener('pointermove', (event) => {
    const box = root.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * size.width;
    let [low, high] = [0, points.length - 1];  // the point nearest to `at` is one of these and those between
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle].x < at) low = middle; else high = middle;
    }
    tell(high >= 0 && points[high].x - at < at - points[low].x ? high : low);
  });
  root.addEventListener('focus', () => tell(current));
  tell(current, false);
  place.replaceChildren(root);
};

// The change that matters most: by kind, then the latest.
const mainChange = (series) => [...series.changes].sort((a, b) => a.kind - b.kind || b.at - a.at)[0];
const valueNow = (series) => (series.items.length > 0 ? formatted(series, series.items[series.items.length - 1].value) : '-');

const makePanel = (series) => {
  const change = mainChange(series);
  const button = make('button', {type: 'button', class: 'open', 'aria-label': `${series.title}: open large`},
      make('span', {class: 'metric'}, series.title), make('span', {class: 'now'}, valueNow(series)));
  if (change) button.append(make('span', {class: `size ${KINDS[change.kind].name}`}, change.size));
  const place = make('div', {class: 'place'});
  const readout = make('p', {class: 'readout'});
  const open = () => showLarge(series.id);
  button.addEventListener('click', open);
  place.addEventListener('click', open);
  drawInto(place, readout, series, series.metric === 'status' ? SMALL_STRIP : SMALL, open);
  return make('figure', {id: `series-${series.id}`, class: `panel ${change ? KINDS[change.kind].name : ''}`}, button, place, readout);
};

const makeConstant = (series) => {
  const many = series.runs.length, total = machines[series.one.machine].runs.length;
  const text = `the same in ${many === total ? `all ${many}` : `${many} of ${total}`} runs`;
  const button = make('button', {type: 'button', id: `series-${series.id}`, class: 'constant', title: text},
      make('span', {class: 'metric'}, series.title), ` ${valueNow(series)}`);
  button.addEventListener('click', () => showLarge(series.id));
  return button;
};

// Makes the panels of a case, which are those of its metrics that are asked for.
const build = (one) => {
  if (one.built) return;
  one.built = true;
  const list = one.raw.filter(isWanted).map((raw) => seriesOf(one, raw));
  const panels = make('div', {class: 'multiples'}), constants = make('p', {class: 'constants'});
  list.forEach((series) => {
    if (isConstant(series)) constants.append(makeConstant(series));
    else panels.append(makePanel(series));
  });
  if (panels.children.length > 0) one.node.append(panels);
  if (constants.children.length > 0) one.node.append(constants);
  one.node.classList.add('built');
};
const unbuild = (one) => {
  if (!one.built) return;
  one.built = false;
  one.node.classList.remove('built');
  while (one.node.children.length > 1) one.node.lastChild.remove();
};

const observer = new IntersectionObserver((entries) => entries.forEach((entry) => {
  if (!entry.isIntersecting) return;
  build(entry.target.case);
  observer.unobserve(entry.target);
}), {rootMargin: '400px'});

// --- One series, large.

const facts = (series) => {
  const machine = machines[series.one.machine];
  const list = [`${series.runs.length} of ${machine.runs.length} runs have a value`];
  if (series.noise > 0) list.push(`noise ${(100 * series.noise).toFixed(series.noise < 0.1 ? 1 : 0)}% from run to run`);
  if (Number.isFinite(series.bound)) list.push(`bound ${formatted(series, series.bound)}`);
  if (series.reason) list.push(`last reason: ${series.reason}`);
  list.push(series.exact ? 'all values are exact' : 'values within 0.1%');
  return list.join(' · ');
};
const changeList = (series) => make('ul', {class: 'changes'}, ...series.changes.map((change) => {
  const from = runOf(series, change.at - 1), to = runOf(series, change.at), kind = KINDS[change.kind];
  const line = make('li', {}, make('b', {class: `size ${kind.name}`}, change.size),
      ` ${change.interval} ${kind.text}: ${formatted(series, change.before)} → ${formatted(series, change.after)}, `,
      commitNode(from), ' → ', commitNode(to), `, ${dateOf(to)} ${to.subject}`);
  change.builds.concat(change.remark || []).forEach((remark) => line.append(make('small', {class: 'faint'}, remark)));
  return line;
}).reverse());
const valueTable = (series) => {
  const details = make('details', {}, make('summary', {}, 'Values'));
  details.addEventListener('toggle', () => {
    if (details.children.length > 1) return;
    const rows = series.items.map((item) => {
      const [value, when] = tellItem(series, item);
      return make('tr', {}, make('td', {}, value), make('td', {class: 'l'}, when));
    }).reverse();
    const head = make('tr', {}, make('th', {scope: 'col'}, 'value'), make('th', {scope: 'col', class: 'l'}, 'run'));
    details.append(make('div', {class: 'table tall', tabindex: '0', role: 'region', 'aria-label': 'Values'},
        make('table', {}, make('thead', {}, head), make('tbody', {}, ...rows))));
  });
  return details;
};

let shownLarge = null;
const drawLarge = () => {
  const place = dialog.querySelector('.place');
  if (!place || !shownLarge) return;
  const width = Math.max(place.clientWidth, 280);
  const height = Math.round(Math.min(Math.max(width * 0.4, 220), 420));
  const size = {width, height, left: shownLarge.metric === 'status' ? 90 : 58, right: 10, top: 20, bottom: 18, large: true};
  drawInto(place, dialog.querySelector('.readout'), shownLarge, size, null);
};
const fillLarge = (series) => {
  shownLarge = series;
  const {one} = series;
  const close = make('button', {type: 'button', class: 'close', 'aria-label': 'Close'}, '×');
  close.addEventListener('click', closeLarge);
  const others = make('p', {class: 'constants'}, ...one.raw.map((raw) => {
    const pressed = String(idOf(one, raw) === series.id);
    const button = make('button', {type: 'button', class: 'constant', 'aria-pressed': pressed}, data.metrics[raw[0]][1]);
    button.addEventListener('click', () => showLarge(idOf(one, raw)));
    return button;
  }));
  dialog.replaceChildren(close, make('h2', {id: 'large-title'}, `${one.name}: ${series.title}`),
      make('p', {class: 'note'}, `${one.problem} · ${one.family} · ${machines[one.machine].signature}`), others,
      make('div', {class: 'place'}), make('p', {class: 'readout'}), changeList(series),
      make('p', {class: 'note'}, facts(series)), valueTable(series));
};
const showLarge = (id) => {
  const series = findSeries(id);
  if (!series) return;
  fillLarge(series);
  if (!dialog.open) dialog.showModal();
  drawLarge();
  dialog.querySelector('.place svg').focus();
  state.large = id;
  writeAddress();
};
const forgetLarge = () => {
  state.large = '';
  shownLarge = null;
  writeAddress();
};
function closeLarge() {
  dialog.close();
  forgetLarge();
}
dialog.addEventListener('close', () => { if (shownLarge && !dialog.open) forgetLarge(); });  // by Escape
dialog.addEventListener('pointerdown', (event) => {
  const box = dialog.getBoundingClientRect();
  const isBeside = event.clientX < box.left || event.clientX > box.right ||
      event.clientY < box.top || event.clientY > box.bottom;
  if (event.target === dialog && isBeside) closeLarge();
});
window.addEventListener('resize', drawLarge);

// --- What is shown, in which order.

const FIELDS = ['text', 'machine', 'family', 'metric', 'last', 'sort', 'changed'];
const state = Object.fromEntries([...FIELDS, 'series', 'large'].map((name) => [name, '']));
const readAddress = () => {
  const values = new URLSearchParams(location.hash.slice(1));
  Object.keys(state).forEach((name) => { state[name] = values.get(name) || ''; });
};
const writeAddress = () => {
  const values = new URLSearchParams();
  Object.entries(state).forEach(([name, value]) => { if (value) values.set(name, value); });
  history.replaceState(null, '', '#' + values.toString());
};
const readForm = () => FIELDS.forEach((name) => {
  const field = form.elements[name];
  if (field) state[name] = field.type === 'checkbox' ? (field.checked ? '1' : '') : field.value;
});
const writeForm = () => FIELDS.forEach((name) => {
  const field = form.elements[name];
  if (!field) return;
  if (field.type === 'checkbox') field.checked = state[name] !== '';
  else field.value = state[name];
});

// Whether a series is asked for, among those of a case that is.
const isWanted = (raw) => (!state.metric || metricOf(raw) === state.metric) && (!state.changed || changesOf(raw).length > 0);
const textOf = (one) => {
  one.text = one.text || `${one.name} ${one.problem} ${one.family} ${one.device}`.toLowerCase();
  return one.text;
};
const largestOf = (one, key) => one.raw.filter(isWanted).reduce((most, raw) => Math.max(most, key(raw)), -Infinity);
const KEYS = {
  '': (one) => -largestOf(one, (raw) => -raw[7]),
  latest: (one) => -largestOf(one, (raw) => Math.max(-1, ...changesOf(raw).map(([run]) => secondsOf(machines[one.machine].runs[run])))),
  noise: (one) => -largestOf(one, (raw) => raw[2]),
  case: (one) => one.order,
};
const ordered = () => {
  const key = KEYS[state.sort] || KEYS[''];
  return cases.map((one) => [key(one), one]).sort(([a, first], [b, second]) => (a === b ? first.rank - second.rank : a - b))
      .map(([, one]) => one);
};

const container = document.getElementById('cases');
let appliedPanels = '||', appliedOrder = '||';  // without a filter, and as the data is
const apply = () => {
  const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
  const panels = [state.metric, state.last, state.changed].join('|');
  if (panels !== appliedPanels) cases.forEach(unbuild);
  const order = [state.sort, state.metric, state.changed].join('|');
  if (order !== appliedOrder) container.append(...ordered().map((one) => one.node));
  container.classList.toggle('dense', state.metric !== '');
  [appliedPanels, appliedOrder] = [panels, order];
  observer.disconnect();
  let shown = 0, series = 0;
  cases.forEach((one) => {
    const wanted = one.raw.filter(isWanted).length;
    const isShown = wanted > 0 && (!state.machine || one.machine + 1 === Number(state.machine)) &&
        (!state.family || one.family === state.family) && words.every((word) => textOf(one).includes(word));
    one.node.hidden = !isShown;
    shown += isShown ? 1 : 0;
    series += isShown ? wanted : 0;
    if (isShown && !one.built) observer.observe(one.node);
  });
  const filtered = words.length > 0 || state.machine || state.family || state.metric || state.changed;
  output.textContent = filtered ? `${shown} of ${cases.length} cases, ${series} series` : '';
};
const clearFilter = () => ['text', 'machine', 'family', 'metric', 'changed'].forEach((name) => { state[name] = ''; });

// Scrolls to a panel and points it out.
const jump = (id) => {
  const series = findSeries(id);
  all('.target').forEach((panel) => panel.classList.remove('target'));
  if (!series) return;
  const find = () => {
    if (!series.one.node.hidden) build(series.one);
    return document.getElementById(`series-${id}`);
  };
  if (series.one.node.hidden || !find()) {
    clearFilter();
    writeForm();
    apply();
  }
  const panel = find();
  panel.classList.add('target');
  panel.scrollIntoView({block: 'center', behavior: 'instant'});
  const stop = panel.querySelector('svg') || panel;
  stop.focus({preventScroll: true});
};

const follow = () => {
  readAddress();
  writeForm();
  apply();
  if (state.series) jump(state.series);
  if (state.large) showLarge(state.large);
  else if (dialog.open) closeLarge();
};

// A case is a heading until it comes into view.
container.append(...cases.map((one) => {
  const problem = machines.length > 1 ? `${one.problem} · machine ${one.machine + 1}` : one.problem;
  const heading = make('h3', {title: `${one.name} ${problem}`}, one.name, ' ', make('small', {class: 'faint'}, problem));
  one.node = make('section', {class: 'case', id: `case-${one.id}`}, heading);
  one.node.case = one;
  return one.node;
}));
form.hidden = false;
form.addEventListener('input', () => { readForm(); state.series = ''; apply(); });
form.addEventListener('change', writeAddress);
form.addEventListener('submit', (event) => { event.preventDefault(); writeAddress(); });
form.addEventListener('reset', (event) => {
  event.preventDefault();
  FIELDS.concat('series').forEach((name) => { state[name] = ''; });
  writeForm();
  apply();
  writeAddress();
});
// Links of the tables keep the filter, unless it hides what they lead to.
document.addEventListener('click', (event) => {
  const link = event.target.closest('a[href^="#series="]');
  if (!link) return;
  event.preventDefault();
  state.series = new URLSearchParams(link.hash.slice(1)).get('series');
  jump(state.series);
  writeAddress();
});
window.addEventListener('hashchange', follow);
// Paper has no scrolling: what is printed is what was drawn, and the first cases.
window.addEventListener('beforeprint', () => cases.filter((one) => !one.node.hidden).slice(0, 40).forEach(build));
follow();
