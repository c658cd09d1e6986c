//! Attribute `jiffy_test`, with which an end-to-end test states its requirements for the machine.
//!
//! The attribute only generates test functions. The crate that uses it provides
//! `crate::support::requirements`, which checks the requirements, and skips the test if one of them
//! is not met.

use proc_macro::TokenStream;
use quote::{format_ident, quote};
use syn::{Ident, ItemFn, LitStr, parse_macro_input};

/// Parsed arguments of the attribute. See [`jiffy_test`].
#[derive(Default)]
struct Arguments {
    engine: Engine,
    not_on_gvisor: Option<LitStr>,
    template: Option<LitStr>,
    root: bool,
    lab: bool,
}

/// Engine of the guest that a test uses.
#[derive(Clone, Copy, Default)]
enum Engine {
    #[default]
    Default,
    Microvm,
    Gvisor,
    Each,
    None,
}

/// Declares a test and its requirements.
///
/// - `engine = "default"`, or no engine: a guest on the default engine of the machine
/// - `engine = "microvm"` or `engine = "gvisor"`: a guest on this engine
/// - `engine = "each"`: two tests, `NAME` on the default engine and `NAME::gvisor`
/// - `engine = "none"`: no guest
/// - `not_on_gvisor = "REASON"`: like `each`, but `NAME::gvisor` is skipped for this reason
/// - `template = "NAME"`: the stock template of the guest, if it is not `base`
/// - `root`: root on the host
/// - `lab`: root, and network namespaces for `support::lab`
#[proc_macro_attribute]
pub fn jiffy_test(arguments: TokenStream, item: TokenStream) -> TokenStream {
    let mut parsed = Arguments::default();
    let parser = syn::meta::parser(|meta| {
        let name = meta.path.get_ident().map(Ident::to_string);
        match name.as_deref() {
            Some("engine") => parsed.engine = engine(&meta.value()?.parse()?)?,
            Some("not_on_gvisor") => parsed.not_on_gvisor = Some(meta.value()?.parse()?),
            Some("template") => parsed.template = Some(meta.value()?.parse()?),
            Some("root") => parsed.root = true,
            Some("lab") => parsed.lab = true,
            _ => return Err(meta.error("unknown requirement")),
        }
        Ok(())
    });
    parse_macro_input!(arguments with parser);
    tests(&parsed, parse_macro_input!(item as ItemFn)).into()
}

fn engine(name: &LitStr) -> syn::Result<Engine> {
    Ok(match name.value().as_str() {
        "default" => Engine::Default,
        "microvm" => Engine::Microvm,
        "gvisor" => Engine::Gvisor,
        "each" => Engine::Each,
        "none" => Engine::None,
        _ => return Err(syn::Error::new(name.span(), "unknown engine")),
    })
}

/// Returns the generated tests: one per engine, each of which checks the requirements first.
fn tests(arguments: &Arguments, mut function: ItemFn) -> proc_macro2::TokenStream {
    let name = function.sig.ident.clone();
    // The function keeps its body under another name. The generated tests call it after the check
    // of the requirements.
    let body = format_ident!("{name}_body");
    function.sig.ident = body.clone();
    let run = |test: &str, engine: &str, path| {
        let Arguments { root, lab, .. } = arguments;
        let template = arguments
            .template
            .as_ref()
            .map_or("base".to_owned(), LitStr::value);
        quote! {
            crate::support::requirements::Requirements {
                test: concat!(module_path!(), #test),
                engine: #engine,
                template: #template,
                root: #root,
                lab: #lab,
            }
            .run(#path)
        }
    };
    let engine = match arguments.engine {
        Engine::Microvm => "microvm",
        Engine::Gvisor => "gvisor",
        Engine::None => "none",
        Engine::Default | Engine::Each => "default",
    };
    // Asynchronous bodies run on a runtime that the crate of the tests provides.
    let call = |path: proc_macro2::TokenStream| match function.sig.asyncness {
        Some(_) => quote!(|| crate::support::requirements::block_on(#path())),
        None => path,
    };
    let test = run(&format!("::{name}"), engine, call(quote!(#body)));
    let body_on_gvisor = match &arguments.not_on_gvisor {
        Some(reason) => Some(quote!(|| crate::support::skip(#reason))),
        None if matches!(arguments.engine, Engine::Each) => Some(call(quote!(super::#body))),
        None => None,
    };
    // A module with the name of the test, so that the test of the other engine is `NAME::gvisor`.
    let on_gvisor = body_on_gvisor.map(|body| {
        let test = run("::gvisor", "gvisor", body);
        quote! {
            mod #name {
                #[test]
                fn gvisor() {
                    #test
                }
            }
        }
    });
    quote! {
        #[test]
        fn #name() {
            #test
        }
        #on_gvisor
        #function
    }
}
