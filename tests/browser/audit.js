// What is wrong with the page as it stands, as a list of sentences. `screen` has its width and whether it is paper.
(async (screen) => {
  const found = [];
  const all = (selector) => [...document.querySelectorAll(selector)];
  const named = (e) => `<${e.tagName.toLowerCase()}> "${(e.textContent || e.alt || e.id).trim().slice(0, 40)}"`;
  const report = (what, elements) => {
    if (elements.length) found.push(`${what}: ${elements.length}, first ${named(elements[0])}`);
  };
  const root = document.scrollingElement;

  if (!screen.paper) for (const details of all('details')) details.open = true;
  await Promise.all(all('img').map((image) => image.decode().catch(() => null)));
  const shown = all('body, body *').filter((e) => e.checkVisibility({ visibilityProperty: true }));
  const style = new Map(shown.map((e) => [e, getComputedStyle(e)]));

  // What the page is.
  if (!document.documentElement.lang) found.push('no language');
  if (!document.title.trim()) found.push('no title');
  if (all('h1').length !== 1) found.push(`${all('h1').length} h1`);

  // What fits: the viewport's width is the one that was asked for, whatever Chromium zooms a wide page to.
  if (root.clientWidth > screen.width) found.push(`laid out for ${root.clientWidth} px: no viewport meta`);
  if (root.scrollWidth > screen.width) found.push(`scrolls horizontally: ${root.scrollWidth} px wide`);
  const boxed = (e) => {
    for (let box = e.parentElement; box && box !== document.body; box = box.parentElement) {
      if (['auto', 'scroll'].includes(style.get(box)?.overflowX)) return true;
    }
    return false;
  };
  const right = (e) => e.getBoundingClientRect().right;
  report('sticks out', shown.filter((e) => right(e) > screen.width + 1 && !boxed(e)));
  const cut = shown.filter((e) => e.scrollWidth > e.clientWidth + 1 && e.clientWidth && style.get(e).overflowX !== 'visible');
  if (screen.paper) report('is cut off', cut);
  else report('scrolls, but not for a keyboard', cut.filter((e) => e.tabIndex < 0));

  // What is said of what cannot be read.
  report('picture without a text alternative', all('img').filter((e) => !e.alt.trim()));
  report('picture that does not load', all('img').filter((e) => !e.naturalWidth));
  report('drawing without a text alternative', all('svg[role=img]').filter((e) => !e.getAttribute('aria-label')?.trim()));
  const headings = all('h2, h3, h4, h5, h6');
  const above = (e) => headings.some((h) => h.compareDocumentPosition(e) & Node.DOCUMENT_POSITION_FOLLOWING);
  const label = (e) => e.caption ?? document.getElementById(e.getAttribute('aria-labelledby'));
  report('table without a caption or heading', all('table').filter((e) => !label(e)?.textContent.trim() && !above(e)));

  // Where links lead.
  const target = (e) => decodeURIComponent(e.getAttribute('href').slice(1));
  report('link to nowhere', all('a[href^="#"]').filter((e) => !document.getElementById(target(e))));
  report('link without words', all('a').filter((e) => !e.textContent.trim()));
  const ids = all('[id]').map((e) => e.id);
  report('id given twice', all('[id]').filter((e) => ids.indexOf(e.id) !== ids.lastIndexOf(e.id)));

  // What can be read: texts but those of drawings, which scale.
  const texts = shown.filter(
    (e) => !e.closest('svg') && [...e.childNodes].some((n) => n.nodeType === Node.TEXT_NODE && n.data.trim()),
  );
  const size = (e) => parseFloat(style.get(e).fontSize);
  if (!screen.paper) report('text below 12 px', texts.filter((e) => size(e) < 12));
  const parse = (colour) => colour.match(/[\d.]+/g).map(Number);
  const luminance = (rgb) => {
    const [r, g, b] = rgb.slice(0, 3).map((c) => (c <= 10 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    for (let box = e; box; box = box.parentElement) {
      const colour = parse(getComputedStyle(box).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const contrast = (e) => {
    const both = [luminance(parse(style.get(e).color)), luminance(behind(e))].sort((a, b) => b - a);
    return (both[0] + 0.05) / (both[1] + 0.05);
  };
  report('contrast below 4.5', texts.filter((e) => contrast(e) < 4.5));
  return found;
})
