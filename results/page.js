// What the report's page does beyond being read: sorts and filters its tables, hides and lights up curves, and
// keeps all of that in its address, as #text=...&family=...&sort=TABLE:COLUMN:ascending. Without it the page is whole.
'use strict';

(() => {
  const all = (selector, root = document) => Array.from(root.querySelectorAll(selector));

  // Numbers as the tables write them, for sorting: 1.5 MiB, 12 ms, 61%, <= 256, +-5%, 2.1e-7 (<= 2e-5).
  const UNITS = {
    B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40,
    ns: 1, 'µs': 1e3, ms: 1e6, s: 1e9, k: 1e3, M: 1e6, G: 1e9, T: 1e12,
  };
  const numberIn = (text) => {
    const found = /^(?:<=|not to|only below|\+-)?\s*(-?(?:\d+\.?\d*(?:e[-+]?\d+)?|inf)|nan)\s*([A-Za-zµ]*)/.exec(text.trim());
    if (!found || found[1] === 'nan') return NaN;
    const number = found[1].endsWith('inf') ? Infinity * (found[1][0] === '-' ? -1 : 1) : Number(found[1]);
    const unit = found[2];
    const scale = UNITS[unit] || (/^[kMGT](FLOP|B)$/.test(unit) ? UNITS[unit[0]] : 1);
    return number * scale;
  };
  // Numbers before texts before nothing; "not to" and "only below" are no crossovers.
  const compare = (a, b) => {
    const rank = (text) => (text === '-' || text === '' ? 3 : Number.isNaN(numberIn(text)) ? 2 : /^(not|only)/.test(text) ? 1 : 0);
    if (rank(a) !== rank(b)) return {order: rank(a) - rank(b), fixed: true};
    const order = rank(a) < 2 ? numberIn(a) - numberIn(b) || 0 : a.localeCompare(b, undefined, {numeric: true});
    return {order, fixed: false};
  };

  const sortTable = (table, column, direction) => {
    const headers = all('thead th', table);
    if (!headers[column]) return;
    headers.forEach((header, i) => {
      if (i === column) header.setAttribute('aria-sort', direction);
      else header.removeAttribute('aria-sort');
    });
    const body = table.tBodies[0];
    const sign = direction === 'descending' ? -1 : 1;
    const rows = Array.from(body.rows).map((row, i) => ({row, i, text: row.cells[column].textContent}));
    rows.sort((a, b) => {
      const {order, fixed} = compare(a.text, b.text);
      return (fixed ? order : sign * order) || a.i - b.i;
    });
    body.append(...rows.map(({row}) => row));
  };

  const state = {text: '', family: '', sort: []};
  const readAddress = () => {
    const address = decodeURIComponent(location.hash.slice(1));
    if (!address.includes('=')) return false;  // the name of a section
    const values = new URLSearchParams(location.hash.slice(1));
    state.text = values.get('text') || '';
    state.family = values.get('family') || '';
    state.sort = values.getAll('sort');
    return true;
  };
  const writeAddress = () => {
    const values = new URLSearchParams();
    if (state.text) values.set('text', state.text);
    if (state.family) values.set('family', state.family);
    state.sort.forEach((sort) => values.append('sort', sort));
    location.replace('#' + values.toString());
  };
  const applySort = () => state.sort.forEach((sort) => {
    const [id, column, direction] = sort.split(':');
    const table = document.getElementById(id);
    if (table && table.tBodies.length) sortTable(table, Number(column), direction === 'descending' ? direction : 'ascending');
  });

  const form = document.querySelector('.controls form');
  const output = form.querySelector('output');
  // One curve of a figure is a stop for the Tab key; arrows lead from it to the others.
  const stopAt = (figure, stop) => all('.curve', figure)
      .forEach((curve) => curve.setAttribute('tabindex', curve === stop ? '0' : '-1'));
  const words = () => state.text.toLowerCase().split(/\s+/).filter(Boolean);
  const applyFilter = () => {
    const wanted = words();
    const filtered = wanted.length > 0 || state.family !== '';
    const matches = (text, family) => (!state.family || family === state.family) &&
        wanted.every((word) => text.toLowerCase().includes(word));
    let shown = 0, total = 0;
    all('tr[data-family]').forEach((row) => {
      row.hidden = !matches(row.textContent, row.dataset.family);
      total += 1;
      shown += row.hidden ? 0 : 1;
    });
    all('figure').forEach((figure) => {
      const kept = new Set();
      let others = 0;  // than the references
      const off = new Set(all('.legend button[aria-pressed=false]', figure).map((button) => button.dataset.key));
      all('.curve', figure).forEach((curve) => {
        const reference = curve.classList.contains('ref');
        const keep = reference || matches(curve.getAttribute('aria-label'), curve.dataset.family);
        curve.classList.toggle('off', !keep || off.has(curve.dataset.key));
        if (keep) kept.add(curve.dataset.key);
        others += keep && !reference ? 1 : 0;
      });
      all('.legend button', figure).forEach((button) => { button.parentElement.hidden = !kept.has(button.dataset.key); });
      const left = all('.curve:not(.off)', figure);
      stopAt(figure, left.find((curve) => curve.tabIndex === 0) || left[0]);
      const visible = new Set(left.map((curve) => curve.dataset.key));
      all('.mark', figure).forEach((mark) => mark.classList.toggle('off', !visible.has(mark.dataset.key)));
      figure.hidden = others === 0 && filtered;
    });
    // What is left empty goes with its headings, and with what leads to it.
    all('section, details').forEach((part) => {
      const contents = all('figure, tr[data-family]', part);
      part.hidden = contents.length > 0 && contents.every((one) => one.hidden);
    });
    all('nav a').forEach((link) => {
      link.parentElement.hidden = document.getElementById(link.hash.slice(1)).hidden;
    });
    output.textContent = filtered ? `${shown} of ${total} rows` : '';
    form.elements.text.value = state.text;
    form.elements.family.value = state.family;
  };

  // Sorting.
  all('table').forEach((table) => {
    if (!table.tHead) return;
    all('thead th', table).forEach((header, column) => {
      const button = document.createElement('button');
      button.type = 'button';
      button.append(...header.childNodes);
      header.append(button);
      button.addEventListener('click', () => {
        const direction = header.getAttribute('aria-sort') === 'ascending' ? 'descending' : 'ascending';
        state.sort = state.sort.filter((sort) => !sort.startsWith(table.id + ':'));
        state.sort.push(`${table.id}:${column}:${direction}`);
        sortTable(table, column, direction);
        writeAddress();
      });
    });
  });

  // Filtering.
  form.hidden = false;
  form.addEventListener('input', () => {
    state.text = form.elements.text.value;
    state.family = form.elements.family.value;
    applyFilter();
  });
  form.addEventListener('change', writeAddress);
  form.addEventListener('submit', (event) => { event.preventDefault(); writeAddress(); });
  form.addEventListener('reset', (event) => {
    event.preventDefault();
    state.text = state.family = '';
    all('.legend button').forEach((button) => button.setAttribute('aria-pressed', 'true'));
    applyFilter();
    writeAddress();
  });

  // Curves: what is pointed at or focused is told in words below its figure.
  all('figure').forEach((figure) => {
    const readout = figure.querySelector('.readout');
    const rest = readout.textContent;
    const tell = (event) => {
      const curve = event.target.closest('.curve');
      if (curve) readout.textContent = curve.getAttribute('aria-label');
    };
    const stop = () => { readout.textContent = rest; };
    figure.addEventListener('mouseover', tell);
    figure.addEventListener('focusin', tell);
    figure.addEventListener('mouseleave', stop);
    figure.addEventListener('focusout', stop);
    const curves = all('.curve', figure);
    stopAt(figure, curves[0]);
    figure.addEventListener('keydown', (event) => {
      const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
      const from = event.target.closest('.curve');
      if (!step || !from) return;
      event.preventDefault();
      const shown = curves.filter((curve) => curve === from || !curve.classList.contains('off'));
      const to = shown[(shown.indexOf(from) + step + shown.length) % shown.length];
      stopAt(figure, to);
      to.focus();
    });
    all('.legend button', figure).forEach((button) => {
      const named = curves.filter((curve) => curve.dataset.key === button.dataset.key);
      const light = (on) => {
        figure.classList.toggle('lit', on);
        named.forEach((curve) => curve.classList.toggle('on', on));
      };
      button.addEventListener('click', () => {
        button.setAttribute('aria-pressed', button.getAttribute('aria-pressed') === 'true' ? 'false' : 'true');
        applyFilter();
      });
      ['mouseenter', 'focus'].forEach((name) => button.addEventListener(name, () => light(true)));
      ['mouseleave', 'blur'].forEach((name) => button.addEventListener(name, () => light(false)));
    });
  });

  const apply = () => { if (readAddress()) { applySort(); applyFilter(); } };
  window.addEventListener('hashchange', apply);
  apply();
})();
