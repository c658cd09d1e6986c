// Characters that could hide or reorder text: controls, and characters that change the direction.
// Names and output of guests are untrusted, so these characters are shown as code points.
const CONTROLS = '\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f'
const DIRECTIONS = '\\u061c\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb'
const HIDDEN = new RegExp(`[${CONTROLS}${DIRECTIONS}\\u{e0000}-\\u{e007f}]`, 'gu')

/** Makes control characters and bidirectional characters visible. */
export function visible(text: string): string {
  return text.replace(HIDDEN, (character) => {
    const code = character.codePointAt(0) ?? 0
    return `⟨${code.toString(16).toUpperCase().padStart(4, '0')}⟩`
  })
}
