// Libraries create <style> elements, which the policy of the page permits only with its nonce. This
// module must be the first import of the entry module, before any library.
const nonce = document.querySelector<HTMLMetaElement>('meta[name=csp-nonce]')?.content ?? ''
const createElement = document.createElement

document.createElement = function (this: Document, tag: string, options?: ElementCreationOptions) {
  const element = createElement.call(this, tag, options)
  if (String(tag).toLowerCase() === 'style') element.setAttribute('nonce', nonce)
  return element
} as typeof document.createElement

// The policy forbids style attributes, by which xterm colours its cells. It permits the properties of
// `style`, which have the same effect.
const { setAttribute } = HTMLSpanElement.prototype
HTMLSpanElement.prototype.setAttribute = function (this: HTMLSpanElement, name: string, value: string) {
  if (name === 'style') this.style.cssText = value
  else setAttribute.call(this, name, value)
}

// The code of `jiffy console` is in the fragment. It is removed from the address bar and from the
// history before anything else happens.
const match = /^#code=([0-9a-f]{32})$/.exec(location.hash)
if (location.hash.startsWith('#code=')) {
  history.replaceState(null, '', location.pathname + location.search)
}

/** Code for signing in, if the address had one. */
export const signInCode = match?.[1]
