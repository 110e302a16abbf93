"""The closed lexicon of the generated world: every name is a pair of parts from these lists.

The lists of name parts share no word with one another, so a word says what kind of name it belongs to, and a name that
was never met before is an unseen pair of seen parts. All of it is invented or everyday English.
"""

from __future__ import annotations

__all__ = ["ADJECTIVES", "AWARDS", "CITIES", "FIRMS", "FIRST_NAMES", "INSTRUMENTS", "LAST_NAMES", "NOUNS", "TRADES"]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST_NAMES = _words(
    """
    Ada Agnes Aldo Alma Anders Anika Arlo Astrid Bela Berta Boris Bruno Carla Cecil Clara Conrad Dagny Dario Delia
    Dmitri Edda Edgar Elsa Emil Enzo Erik Esther Fabian Felix Flora Frida Gideon Greta Gustav Hanna Hector Hilda
    Hugo Ida Ilse Imre Ingrid Irma Ivan Jasper Jonas Judith Karin Kaspar Klara Lars Laszlo Leonie Linus Livia
    Lotte Magnus Malin Marek Matilda Milo Mira Nadia Nestor Nils Nora Olaf Olga Oskar Otto Paula Pavel Petra
    Quentin Ragna Rufus Sabine Selma Sigrid Silas Simone Stellan Tamara Tilda Tobias Ulrich Ursula Valentin Vera
    Viggo Wanda Wilhelm Xenia Yara Yorick Zelda Zora
    """
)

LAST_NAMES = _words(
    """
    Abendroth Ackerley Alvarn Amsel Arvid Ashgrove Balder Barlund Beckford Bellamy Bergson Birch Blomqvist Bordeau
    Brandt Brisco Calder Carrow Castell Corvin Cranmer Dahl Darnell Devray Dorset Drexler Dunmore Eastlake Eckhart
    Elgar Ellery Engel Fabricius Fairfax Falk Farrow Fenwick Fiske Forsberg Frost Gallant Garrick Gerhard Gladwin
    Gorski Granger Hadley Halvorsen Hargrove Hartwig Havel Hedlund Holloway Holm Ibsen Ingram Isaksen Jardine
    Jarvis Jessen Kastner Keller Kestrel Kirsch Kovac Kruger Lachlan Lambert Larkin Lindqvist Lockhart Lorenz Lund
    Madsen Marlow Mercer Molnar Montrose Morgan Nansen Navarro Nerval Norrby Novak Oakley Ohlsen Orsini Pelham
    Perrin Petrov Pickford Prokop Quimby Radcliff Ravn Redgrave Reuter Rosval Rusk Sandoval Sayer Selwyn Severin
    Sorel Stahl Steiner Strand Sundin Talbot Tennant Thorne Tolland Trask Ullman Vance Varga Vogel Voss Wakefield
    Weiss Westby Winslow Wolfram Wyatt Yarrow Zeller Ziegler Zoltan
    """
)

ADJECTIVES = _words(
    """
    Amber Ancient Bitter Borrowed Bright Broken Burning Buried Crimson Crooked Crystal Dancing Distant Drifting
    Drowned Dusty Eastern Empty Endless Fallen Fading Feathered Final Floating Forgotten Frozen Gentle Gilded
    Golden Hidden Hollow Honest Iron Ivory Jealous Laughing Lonely Longest Lost Marble Midnight Moonlit Narrow
    Northern Painted Pale Patient Quiet Restless Salted Scarlet Second Secret Shattered Silent Silver Sleeping
    Southern Stolen Sunken Twisted Velvet Wandering Western Wicked Winter Wooden
    """
)

NOUNS = _words(
    """
    Anchor Apple Arrow Balcony Basket Beacon Bell Bridge Candle Canyon Carousel Castle Cathedral Clock Compass
    Corridor Crown Desert Door Dragon Echo Ember Engine Falcon Feast Ferry Field Fountain Fox Garden Gate Glacier
    Harbor Harvest Heron Hour Island Kettle Key Lagoon Lantern Letter Lighthouse Lion Mask Meadow Mirror Moth
    Mountain Oath Ocean Orchard Owl Palace Pearl Pilgrim Portrait Prairie Raven Ribbon River Road Rose Sail Shadow
    Shore Sparrow Staircase Storm Stranger Summer Temple Thunder Tiger Tower Train Valley Violet Voyage Wagon
    Whisper Window Wolf Wren
    """
)

FIRMS = _words(
    """
    Altera Avenor Basalt Brightwell Calyx Cobalt Corvus Delphine Dynamo Eastmark Elmstone Equinox Fairwind Fathom
    Foxglove Galvan Granite Greystone Halcyon Helix Highgate Ironwood Juniper Kingsley Larkspur Lodestar Longacre
    Lumina Marigold Meridian Monarch Nimbus Northgate Oakhurst Octavia Onyx Orion Paragon Pembroke Pinnacle Quarry
    Quillon Redwood Regent Saffron Sextant Silverline Solstice Sterling Summit Tamarind Tempest Tessera Trident
    Umbra Vanguard Vertex Westmark Willow Zenith
    """
)

TRADES = _words(
    """
    Brothers Company Group House Partners Press Records Studios Union Works
    """
)

CITIES = _words(
    """
    Aldermoor Arkhaven Ashbourne Belgrano Brackwater Calverton Carrick Coldharbour Corintha Dalmere Dunhollow
    Eastvale Elberon Estmouth Fallowdale Ferncliff Galdera Glenmarch Graywick Harrowgate Havenport Hollin Islemere
    Kaldura Kingsmere Lakemont Larnaca Lindhaven Lowmarsh Maribor Marsden Merrow Nordhavn Norwick Oldport Orsova
    Penhallow Portmere Quellin Ravenna Ridgeway Rosmund Saltash Selwick Stormhaven Tarnow Thornbury Umberleigh
    Valmere Vestby Wexcombe Whitmore Wyndham Yarmouth Zellin Zerava
    """
)

AWARDS = _words(
    """
    Aurora Bronze Cedar Comet Copper Eagle Garnet Jade Laurel Lotus Opal Phoenix Ruby Sapphire Topaz Tulip
    """
)

INSTRUMENTS = _words(
    """
    accordion bassoon cello clarinet drums flute guitar harp oboe piano trumpet violin
    """
)
